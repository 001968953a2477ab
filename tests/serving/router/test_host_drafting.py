"""Hosts that draft: the text is that of `ar`, whatever their draft head guesses and whatever happens to them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import AsyncClient, Client, Result
from stages.host.drafter import HeadDrafter, ModelDrafter
from tests.serving.pretrained import add_random_draft_head, write_model

PROMPT = "the old man said that the sea"
BY_HOSTS = {"mode": "ar-speculative"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "int8": {"codec": "int8"},
    "wide tree": {"branches": 8, "draft": 30},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {101: 4.0, 7: -50.0}},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 3},
    "one token": {"max_tokens": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafting") / "model"
    write_model(directory)
    add_random_draft_head(directory)
    return directory


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has itself beside it."""
    directory = tmp_path_factory.mktemp("copied") / "model"
    write_model(directory)
    write_model(directory / "local")
    return directory


@pytest.fixture(scope="module", params=["a head, 1", "a head, 3", "a copy, 3"])
def client(request: pytest.FixtureRequest, model: Path, copied: Path, local_ring: Any) -> Iterator[Client]:
    drafter, hosts = request.param.split(", ")
    with local_ring(model if drafter == "a head" else copied, int(hosts)) as opened:
        yield opened


def streamed(client: Client, **settings: Any) -> tuple[Result, list[Any]]:
    """Result and log-probabilities."""

    async def events() -> list[Any]:
        async with AsyncClient(client.address) as opened:
            return [event async for event in opened.events(PROMPT, **settings)]

    items = asyncio.run(events())
    told = [each for item in items if isinstance(item, list) for each in item]
    (result,) = [item for item in items if isinstance(item, Result)]
    return result, told


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_text_is_that_of_ar(client: Client, name: str) -> None:
    settings = {"max_tokens": 40, "seed": 5} | SETTINGS[name]
    of_ar = {name: value for name, value in settings.items() if name not in ("branches", "draft")}
    expected, told = streamed(client, mode="ar", **of_ar)
    result, told_too = streamed(client, **settings, **BY_HOSTS)
    assert result.output == expected.output
    assert told_too == told
    assert bool(told) == (name == "logprobs")
    assert result.sweeps <= expected.sweeps
    if name == "wide tree":
        assert result.accepted > 0, "some guesses stand, or nothing is tried here"
        assert result.sweeps < expected.sweeps


def test_a_grammar_tells_hosts_most_of_a_text(tmp_path: Path, local_ring: Any) -> None:
    """A random draft head guesses nothing, and knows some of the tokens only."""
    write_model(tmp_path, ends=[1])
    add_random_draft_head(tmp_path)
    said = {"const": "the sea was calm and the old ship lay still"}
    fields = {"captain": said, "crew": {"enum": [7, 12]}, "mate": said}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    settings: dict[str, Any] = {"max_tokens": 150, "seed": 5, "json_schema": json.dumps(schema)}
    with local_ring(tmp_path, 2) as client:
        for temperature in (0.0, 1.2):
            settings["temperature"] = temperature
            expected = client.generate(PROMPT, mode="ar", **settings)
            result = client.generate(PROMPT, **settings, **BY_HOSTS)
            assert result.output == expected.output
            assert b"old ship" in result.output
            assert result.sweeps < expected.sweeps / 2


def test_a_copy_of_the_model_is_right_nearly_always(copied: Path, local_ring: Any) -> None:
    """Its products are of 8 bits, where the processor has such."""
    with local_ring(copied, 3) as client:
        result = client.generate(PROMPT, mode="ar-speculative", max_tokens=60, seed=5, draft=10)
        assert result.output == client.generate(PROMPT, mode="ar", max_tokens=60, seed=5).output
        assert result.sweeps <= 30, "a trip brings two tokens at least, and up to ten"


def test_a_long_prompt_and_the_turn_after_it(client: Client) -> None:
    """The prompt travels in pieces, and the hosts have its beginning in memory the second time."""
    prompt = "The sea was calm, and the ship lay still. " * 7
    expected = client.generate(prompt, mode="ar", max_tokens=30, seed=4).output
    for _ in range(3):
        assert client.generate(prompt, max_tokens=30, seed=4, draft=30, branches=8, **BY_HOSTS).output == expected


@pytest.mark.parametrize("step", ["read", "draft"])
def test_a_draft_head_that_fails_costs_drafts_and_no_text(
    client: Client, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    expected = client.generate(PROMPT, mode="ar", max_tokens=20, seed=3)

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    for kind in (HeadDrafter, ModelDrafter):
        monkeypatch.setattr(kind, step, fail)
    result = client.generate(PROMPT, max_tokens=20, seed=3, **BY_HOSTS)
    assert (result.output, result.drafted, result.replays) == (expected.output, 0, 0)
