"""Modes of a token model that need a drafter beside the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import Client, RequestRefused, Result
from serving.modes.candidates import Branches
from serving.modes.drafters.base import LocalSequence
from serving.modes.drafters.neural import NeuralModel
from serving.modes.resample import OF_TOKENS
from stages.model.llama import LlamaStage
from tests.serving.pretrained import ALPHABET, DRAFTER, ids, text_of, write_model, written

PROMPT = "the old man said that the sea"
COUNT = 24


@dataclass(frozen=True)
class Scene:
    """A token model over hosts, with its drafter."""

    client: Client
    model: list[LlamaStage]
    drafter: list[LlamaStage]
    local: NeuralModel


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, local_ring: Callable[..., Any]) -> Iterator[Scene]:
    directory: Path = tmp_path_factory.mktemp("drafted")
    model, drafter = write_model(directory), write_model(directory / "local", seed=1, architecture=DRAFTER)
    with local_ring(directory, 3) as client:
        yield Scene(client, model, drafter, NeuralModel(directory / "local"))


def write(scene: Scene, mode: str, **settings: Any) -> Result:
    return scene.client.generate(
        PROMPT, **{"mode": mode, "max_tokens": COUNT, "temperature": 0.8, "seed": 5, **settings}
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_drafter_writes_alone(scene: Scene, temperature: float) -> None:
    expected = written(scene.drafter, ids(PROMPT), COUNT, temperature=temperature, seed=5)
    result = scene.client.generate(PROMPT, mode="local", max_tokens=COUNT, temperature=temperature, seed=5)
    assert result.text == text_of(expected)
    assert (result.prompt_tokens, result.output_tokens, result.sweeps) == (len(ids(PROMPT)), COUNT, 0)


@pytest.mark.parametrize("drafter", ["model", "both", None])
def test_guesses_of_the_drafter_leave_the_text_as_it_is(scene: Scene, drafter: str | None) -> None:
    expected = written(scene.model, ids(PROMPT), COUNT, temperature=0.8, seed=5)
    asked: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.8, "seed": 5, "draft": 4, "drafter": drafter}
    result = scene.client.generate(PROMPT, mode="ar-speculative", **asked)
    assert result.text == text_of(expected)
    assert result.drafted > 0


# Verified


def test_at_temperature_0_verified_is_what_the_pipeline_writes(scene: Scene) -> None:
    expected = text_of(written(scene.model, ids(PROMPT), COUNT))
    for draft in (1, 7, None):
        result = write(scene, "verified", temperature=0.0, draft=draft)
        assert (result.text, result.output_tokens) == (expected, COUNT)


def test_a_verified_text_is_the_same_however_much_is_guessed(scene: Scene) -> None:
    results = [write(scene, "verified", seed=3, draft=draft) for draft in (1, 5, 64, None)]
    assert len({result.text for result in results}) == 1
    assert {result.reached for result in results} == {COUNT}, "each is a guess that was tried, or came in its place"
    assert 0 < results[0].accepted < COUNT
    assert results[2].sweeps < COUNT


# Candidates


def test_resample_chooses_among_chunks_of_tokens(scene: Scene) -> None:
    result = write(scene, "resample")
    assert (result.output_tokens, result.sweeps, result.chunk, result.candidates) == (COUNT, 2, 12, 32)
    assert 1 <= result.effective_samples <= 32
    assert write(scene, "resample").text == result.text
    assert write(scene, "resample", seed=6).text != result.text
    assert write(scene, "resample", chunk=5, candidates=3).sweeps == 5


def test_candidates_are_drawn_a_little_colder(scene: Scene) -> None:
    sequence = LocalSequence(scene.local, 100, OF_TOKENS.coolness * 0.8, seed=5)
    start = ALPHABET.encode(ids(PROMPT))
    drawn = asyncio.run(Branches(sequence).write(start, length=COUNT, count=1, number=0))
    result = write(scene, "resample", chunk=COUNT, candidates=1)
    assert result.text == text_of(ALPHABET.symbols(drawn.texts[0]))
    assert OF_TOKENS.coolness < 1


def test_a_gap_is_filled_with_tokens(scene: Scene) -> None:
    result = write(scene, "infill", suffix=" and the ship", max_tokens=10)
    assert (result.output_tokens, result.sweeps, result.candidates) == (10, 2, 16)
    assert write(scene, "infill", suffix=" and the ship", max_tokens=10).text == result.text


def test_what_has_no_room_is_refused_before_a_host_is_asked(scene: Scene) -> None:
    for settings, sentence in (
        ({"mode": "resample", "candidates": 256, "chunk": 24}, "256 candidates of 24 tokens are more than hosts take"),
        (
            {"mode": "infill", "candidates": 256, "chunk": 24, "suffix": "x"},
            "24 tokens with 1 of the suffix are",
        ),
        ({"mode": "verified", "drafter": "lookup"}, "has no drafter 'lookup' here; choose from model"),
        ({"mode": "verified", "scorer": "chain"}, "scorer 'chain' cannot be served"),
        ({"mode": "resample", "max_tokens": 511}, r"prompt \(\d+ tokens\) and output \(511\)"),
    ):
        with pytest.raises(RequestRefused, match=sentence):
            write(scene, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["local", "verified", "resample"])
def test_an_end_token_ends_what_is_written(ending: tuple[Client, int], mode: str) -> None:
    client, most = ending
    result = client.generate(PROMPT, mode=mode, max_tokens=200, temperature=0.0 if mode != "resample" else 0.01)
    assert result.stopped
    assert 0 < result.output_tokens <= most


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, local_ring: Callable[..., Any]) -> Iterator[tuple[Client, int]]:
    """A model that is its own drafter and ends its text, and after how many tokens."""
    directory: Path = tmp_path_factory.mktemp("ending")
    expected = written(write_model(directory / "free"), ids(PROMPT), COUNT)
    end = next(token for token in expected[3:] if token not in expected[:3])
    for each in (directory / "model", directory / "model" / "local"):
        write_model(each, ends=[end])
    with local_ring(directory / "model", 1) as client:
        yield client, expected.index(end) + 1
