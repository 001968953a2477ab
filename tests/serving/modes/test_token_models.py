"""A token model over hosts: its own text, whole characters, and limits, ends and accounts in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.client.client import Client, RequestRefused, Result
from serving.modes.drafters.ngram import fit, write_ngrams
from serving.modes.tokenizer import tokenizer_id
from stages.checkpoint.manifest import read_manifest
from stages.model.llama import LlamaStage
from tests.serving.pretrained import ARCHITECTURE, ids, text_of, write_model, written

PROMPT = "the old man said that the sea"
COUNT = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LlamaStage]]:
    directory = tmp_path_factory.mktemp("pretrained")
    return directory, write_model(directory)


@pytest.fixture(scope="module")
def served(model: tuple[Path, list[LlamaStage]], local_ring: Callable[..., Any]) -> Iterator[Client]:
    with local_ring(model[0], 3) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["ar", "ar-speculative"])
def test_the_text_is_that_of_one_process(
    served: Client, model: tuple[Path, list[LlamaStage]], mode: str, temperature: float
) -> None:
    expected = written(model[1], ids(PROMPT), COUNT, temperature=temperature, seed=5)
    result = served.generate(PROMPT, mode=mode, max_tokens=COUNT, temperature=temperature, seed=5)
    assert result.text == text_of(expected)
    assert (result.prompt_tokens, result.output_tokens) == (len(ids(PROMPT)), COUNT)
    assert (result.prompt_bytes, result.output_bytes) == (len(PROMPT.encode()), len(result.text.encode()))
    assert not result.stopped
    assert result.sweeps == COUNT if mode == "ar" else result.sweeps <= COUNT


def test_a_lookup_drafts_tokens(served: Client) -> None:
    # a model that repeats itself is one that lookup guesses right
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "seed": 1}
    plain = served.generate(PROMPT, mode="ar", **asked)
    drafted = served.generate(PROMPT, mode="ar-speculative", drafter="lookup", draft=4, **asked)
    assert drafted.text == plain.text
    assert drafted.drafted >= drafted.accepted > 0
    assert drafted.sweeps == drafted.output_tokens - drafted.accepted


def test_no_character_is_cut_on_its_way(served: Client) -> None:
    pieces = list(served.stream("море 🚢", mode="ar", max_tokens=60, temperature=1.0, seed=3))
    *texts, result = pieces
    assert isinstance(result, Result)
    assert all(isinstance(text, bytes) and text.decode() for text in texts)
    assert b"".join(text for text in texts if isinstance(text, bytes)) == result.output


def test_stops_are_found_across_tokens(served: Client, model: tuple[Path, list[LlamaStage]]) -> None:
    whole = served.generate(PROMPT, mode="ar", max_tokens=COUNT, temperature=0.8, seed=5).text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    for mode in ("ar", "ar-speculative"):
        result = served.generate(PROMPT, mode=mode, max_tokens=COUNT, temperature=0.8, seed=5, stops=[stop])
        assert result.text == whole[: whole.index(stop)]
        assert result.stopped
        assert result.output_tokens <= COUNT


def test_a_limit_of_bytes_cuts_no_character(served: Client) -> None:
    whole = served.generate(PROMPT, mode="ar", max_tokens=40, temperature=0.8, seed=5).output
    for most in range(1, 12):
        result = served.generate(PROMPT, mode="ar", max_bytes=most, temperature=0.8, seed=5)
        assert whole.startswith(result.output)
        assert result.output_bytes == len(result.output) <= most
        assert most - result.output_bytes < 4
        assert not result.stopped


def test_messages_are_written_by_the_template(served: Client, model: tuple[Path, list[LlamaStage]]) -> None:
    prompt = "<|begin|>system: be kind\n<|begin|>user: the sea\nassistant: "
    messages = [("system", "be kind"), ("user", "the sea")]
    result = served.generate("", messages=messages, mode="ar", max_tokens=8, temperature=0.0)
    assert result.text == text_of(written(model[1], ids(prompt), 8))
    assert (result.prompt_tokens, result.prompt_bytes) == (len(ids(prompt)), len(prompt))
    with pytest.raises(RequestRefused, match="does not take these messages: no tools here"):
        served.generate("", messages=[("tool", "x")], mode="ar", max_tokens=8)


def test_what_it_cannot_do_is_said(served: Client) -> None:
    assert list(served.status().modes) == ["ar", "ar-speculative"]
    assert served.status().context_tokens == ARCHITECTURE.positions
    for settings, sentence in (
        ({"mode": "sweep"}, "the hosts have no chain of blocks"),
        ({"mode": "chunked"}, "the hosts have no chain of blocks"),
        ({"mode": "verified"}, "no drafter that writes the hosts' tokens: make one with `onesweep distill`"),
        ({"mode": "resample"}, "no drafter that writes the hosts' tokens"),
        ({"mode": "local"}, "no local model: start it with a checkpoint that has local/, which `onesweep distill`"),
        ({"mode": "ar-speculative", "drafter": "model"}, "no drafter that writes the hosts' tokens"),
        ({"mode": "ar", "max_tokens": 510}, r"prompt \(\d+ tokens\) and output \(510\) together take \d+, "),
    ):
        with pytest.raises(RequestRefused, match=sentence):
            served.generate(PROMPT, **{"max_tokens": 4, **settings})  # type: ignore[arg-type]


def test_a_text_ends_where_the_model_ends_it(
    model: tuple[Path, list[LlamaStage]], tmp_path: Path, local_ring: Callable[..., Any]
) -> None:
    expected = written(model[1], ids(PROMPT), COUNT, temperature=0.8, seed=5)
    at = next(i for i in range(4, COUNT) if expected[i] not in expected[:i])
    write_model(tmp_path, ends=[expected[at]])
    again = np.array((ids(PROMPT) + expected) * 3, dtype=np.uint32)
    ngrams = fit(again, ARCHITECTURE.vocabulary, 4, tokenizer_id(read_manifest(tmp_path)))
    write_ngrams(tmp_path / "ngram.safetensors", ngrams)
    guessed: dict[str, Any] = {"mode": "ar-speculative", "drafter": "ngram", "branches": 3, "draft": 12}
    with local_ring(tmp_path, 3) as client:
        for settings in ({"mode": "ar"}, {"mode": "ar-speculative"}, guessed):
            result = client.generate(PROMPT, max_tokens=COUNT, temperature=0.8, seed=5, **settings)
            assert result.text == text_of(expected[: at + 1])
            assert (result.output_tokens, result.stopped) == (at + 1, True)
    assert result.accepted > 0
    assert result.sweeps < at + 1, "guesses saved trips"
