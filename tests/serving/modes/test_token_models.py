"""A token model over hosts: its own text in every mode, whole characters, and limits, ends and accounts in tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.client.client import Client, RequestRefused, Result
from serving.router.own_models import LocalModel
from stages.backends.whole_model import Continuations, WholeModel
from stages.model.llama import LlamaStage
from stages.model.resampling import weigh
from tests.serving.pretrained import ARCHITECTURE, DRAFTER, VOCABULARY, ids, panicking, text_of, write_model, written

PROMPT = "the old man said that the sea"
COUNT = 24


@dataclass(frozen=True)
class Scene:
    """A token model over hosts, with its drafter."""

    client: Client
    model: list[LlamaStage]
    drafter: list[LlamaStage]
    local: LocalModel


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[Scene]:
    directory: Path = tmp_path_factory.mktemp("drafted")
    model, drafter = write_model(directory), write_model(directory / "local", seed=1, architecture=DRAFTER)
    with local_ring(directory, 3) as client:
        yield Scene(client, model, drafter, LocalModel(directory / "local"))


def write(scene: Scene, mode: str, **settings: Any) -> Result:
    return scene.client.generate(
        PROMPT, **{"mode": mode, "max_tokens": COUNT, "temperature": 0.8, "seed": 5, **settings}
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_one_process(scene: Scene, temperature: float) -> None:
    expected = text_of(written(scene.model, ids(PROMPT), COUNT, temperature=temperature, seed=5))
    result = write(scene, "ar", temperature=temperature)
    assert result.text == expected
    assert (result.prompt_tokens, result.output_tokens, result.sweeps) == (len(ids(PROMPT)), COUNT, COUNT)
    assert (result.prompt_bytes, result.output_bytes) == (len(PROMPT.encode()), len(expected.encode()))
    assert not result.stopped
    guessed = write(scene, "ar-speculative", temperature=temperature, draft=4)
    assert guessed.text == expected
    assert guessed.drafted > 0


# Candidates


def drawn(scene: Scene, chunk: int, count: int) -> str:
    """The text of `resample` in one process."""
    drafter, text = WholeModel(scene.local.directory), ids(PROMPT)
    known = drafter.open(ARCHITECTURE.positions)
    while left := len(ids(PROMPT)) + COUNT - len(text):
        job = Continuations(known, VOCABULARY.encode(text), 0.8, 5, min(chunk, left), count)
        while not job.is_done:
            drafter.write([job])
        drafted = job.candidates()
        pieces = [VOCABULARY.tokens(each) for each in drafted.texts]
        x = torch.tensor([[*text, *piece] for piece in pieces])
        for stage in scene.model:
            x = stage.read(x)
        nats = (scene.model[-1].next_byte(x)[:, len(text) - 1 : -1].double() / 0.8).log_softmax(-1)
        totals = nats.gather(2, torch.tensor(pieces)[..., None]).sum((1, 2)).detach().numpy()
        text += pieces[weigh(totals, drafted.nats.sum(axis=1), min(chunk, left)).choose(5, len(text))]
    return text_of(text[len(ids(PROMPT)) :])


@pytest.mark.parametrize(("chunk", "candidates"), [(COUNT, 16), (5, 3), (23, 40)])
def test_the_last_host_samples_among_candidates(scene: Scene, chunk: int, candidates: int) -> None:
    result = write(scene, "resample", chunk=chunk, candidates=candidates, codec="fp32")
    assert result.text == drawn(scene, chunk, candidates)
    assert (result.output_tokens, result.chunk, result.candidates) == (COUNT, chunk, candidates)
    assert result.sweeps == 1 + -(-COUNT // chunk), "one for the prompt"
    assert 1 <= result.effective_samples <= candidates


def test_one_trip_writes_all_tokens_unless_a_chunk_is_given(scene: Scene) -> None:
    result = write(scene, "resample")
    assert (result.output_tokens, result.sweeps, result.chunk, result.candidates) == (COUNT, 2, COUNT, 16)
    assert write(scene, "resample", seed=6).text != result.text
    assert write(scene, "resample", max_tokens=480).chunk == 256, "as many tokens as a message holds of 16 candidates"
    one_by_one = write(scene, "resample", chunk=1)
    assert (one_by_one.output_tokens, one_by_one.sweeps) == (COUNT, COUNT)


def test_ar_speculative_writes_if_the_distance_bound_is_too_large(scene: Scene) -> None:
    settings: dict[str, Any] = {"chunk": 12, "candidates": 64, "temperature": 3.0}
    near = write(scene, "resample", **settings)
    assert 0 < near.distance_bound < 1
    allowed = write(scene, "resample", **settings, max_distance=near.distance_bound + 1e-3)
    assert (allowed.text, allowed.reason) == (near.text, "")
    half = write(scene, "resample", **settings, max_distance=near.distance_bound - 1e-3)
    assert half.text[:8] == near.text[:8]
    assert half.reason.startswith("12 tokens are of mode resample, the rest of ar-speculative: ")
    exact = write(scene, "resample", max_distance=0.0)
    assert (exact.text, exact.distance_bound) == (write(scene, "ar").text, 0.0)
    assert "above the max_distance of 0" in exact.reason


@pytest.mark.parametrize("mode", ["local:copy", "resample"])
def test_an_end_token_ends_a_local_or_resampled_text(ending: tuple[Client, int], mode: str) -> None:
    client, most = ending
    result = client.generate(PROMPT, mode=mode, max_tokens=200, temperature=0.0 if mode != "resample" else 0.01)
    assert result.stopped
    assert 0 < result.output_tokens <= most


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[tuple[Client, int]]:
    """A model that is its own drafter and ends its text, and after how many tokens."""
    directory: Path = tmp_path_factory.mktemp("ending")
    expected = written(write_model(directory / "free"), ids(PROMPT), COUNT)
    end = next(token for token in expected[3:] if token not in expected[:3])
    for each in (directory / "model", directory / "model" / "local"):
        write_model(each, ends=[end])
    with local_ring(directory / "model", 1) as client:
        yield client, expected.index(end) + 1


# Whole characters, limits and ends


def test_stop_strings_are_found_across_tokens(scene: Scene) -> None:
    whole = scene.client.generate(PROMPT, mode="ar", max_tokens=COUNT, temperature=0.8, seed=5).text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    for mode in ("ar", "ar-speculative"):
        result = scene.client.generate(PROMPT, mode=mode, max_tokens=COUNT, temperature=0.8, seed=5, stops=[stop])
        assert result.text == whole[: whole.index(stop)]
        assert result.stopped
        assert result.output_tokens <= COUNT


def test_a_stop_string_may_name_a_control_token(scene: Scene) -> None:
    always = {"logit_bias": {1: 100.0}}  # <|end|>, which no text shows
    endless, ended = write(scene, "ar", **always), write(scene, "ar", stops=["x", "<|end|>"], **always)
    assert (endless.text, endless.output_tokens, endless.stopped) == ("", COUNT, False)
    assert (ended.text, ended.output_tokens, ended.stopped) == ("", 1, True)


def test_a_byte_limit_splits_no_character(scene: Scene) -> None:
    whole = scene.client.generate(PROMPT, mode="ar", max_tokens=40, temperature=0.8, seed=5).output
    for most in range(1, 12):
        result = scene.client.generate(PROMPT, mode="ar", max_bytes=most, temperature=0.8, seed=5)
        assert whole.startswith(result.output)
        assert result.output_bytes == len(result.output) <= most
        assert most - result.output_bytes < 4
        assert not result.stopped


def test_messages_are_rendered_by_the_template(scene: Scene) -> None:
    prompt = "<|begin|>system: be kind\n<|begin|>user: the sea\nassistant: "
    messages = [("system", "be kind"), ("user", "the sea")]
    result = scene.client.generate("", messages=messages, mode="ar", max_tokens=8, temperature=0.0)
    assert result.text == text_of(written(scene.model, ids(prompt), 8))
    assert (result.prompt_tokens, result.prompt_bytes) == (len(ids(prompt)), len(prompt))
    with pytest.raises(RequestRefused, match="rejects these messages: no critics here"):
        scene.client.generate("", messages=[("critic", "x")], mode="ar", max_tokens=8)


def test_a_tokenizer_that_panics_fails_only_its_request(tmp_path: Path, local_ring: Any) -> None:
    write_model(tmp_path, spelling=panicking())
    hostile = "a" * 30 + "b"
    with local_ring(tmp_path, 3) as client:
        for prompt, messages in ((hostile, ()), ("", [("user", hostile)])):
            with pytest.raises(RequestRefused, match=r"tokenizer fails on this text \(Onig.*retry-limit"):
                client.generate(prompt, messages=messages, mode="ar", max_tokens=1)
            assert client.generate(PROMPT, mode="ar", max_tokens=1).output_tokens == 1


def test_a_text_ends_at_the_end_token_of_the_model(scene: Scene, tmp_path: Path, local_ring: Any) -> None:
    expected = written(scene.model, ids(PROMPT), COUNT, temperature=0.8, seed=5)
    at = next(i for i in range(4, COUNT) if expected[i] not in expected[:i])
    write_model(tmp_path, ends=[expected[at]])
    write_model(tmp_path / "local", ends=[expected[at]])  # the same model as drafter: it guesses right
    guessed: dict[str, Any] = {"mode": "ar-speculative", "branches": 3, "draft": 12}
    with local_ring(tmp_path, 3) as client:
        for settings in ({"mode": "ar"}, {"mode": "ar-speculative"}, guessed):
            result = client.generate(PROMPT, max_tokens=COUNT, temperature=0.8, seed=5, **settings)
            assert result.text == text_of(expected[: at + 1])
            assert (result.output_tokens, result.stopped) == (at + 1, True)
    assert result.accepted > 0
    assert result.sweeps < at + 1, "drafts saved trips"


# Weights in fewer bits


@pytest.mark.parametrize("stored", ["q8", "q4", "bfloat16"])
def test_quantized_weights_write_one_text_on_any_number_of_hosts(tmp_path: Path, local_ring: Any, stored: Any) -> None:
    write_model(tmp_path, architecture=replace(ARCHITECTURE, head_dim=16, mlp_width=64, weights=stored))
    write_model(tmp_path / "local", seed=1, architecture=DRAFTER)
    texts = set()
    for hosts in (1, 3):
        with local_ring(tmp_path, hosts) as client:
            for mode in ("ar", "ar-speculative"):
                texts.add(client.generate(PROMPT, mode=mode, max_tokens=COUNT, temperature=0.8, seed=5).text)
    assert len(texts) == 1
