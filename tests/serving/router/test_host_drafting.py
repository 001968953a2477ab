"""Hosts that draft: the text is that of `ar`, whatever their drafter proposes and if it fails."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving.client.client import AsyncClient, Client, Result
from stages.host.drafter import Drafter
from tests.serving.pretrained import DRAFTER, write_model

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


@pytest.fixture(scope="module", params=["a stranger, 1", "a stranger, 3", "a copy, 3"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, local_ring: Any
) -> Iterator[Client]:
    """Hosts of a model that has another one of its tokens beside it, or itself."""
    drafter, hosts = request.param.split(", ")
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, ends=[1])
    write_model(directory / "local", **({} if drafter == "a copy" else {"seed": 1, "architecture": DRAFTER}))
    with local_ring(directory, int(hosts)) as opened:
        yield opened


def streamed(client: Client, **settings: Any) -> tuple[Result, list[Any]]:
    """Result and log-probabilities."""

    async def events() -> list[Any]:
        async with AsyncClient(client.address) as opened:
            return [event async for event in opened.events(PROMPT, **settings)]

    items = asyncio.run(events())
    pieces = [each for item in items if isinstance(item, list) for each in item]
    (result,) = [item for item in items if isinstance(item, Result)]
    return result, pieces


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_text_is_that_of_ar(client: Client, name: str) -> None:
    settings = {"max_tokens": 40, "seed": 5} | SETTINGS[name]
    of_ar = {name: value for name, value in settings.items() if name not in ("branches", "draft")}
    expected, logprobs = streamed(client, mode="ar", **of_ar)
    result, drafted_logprobs = streamed(client, **settings, **BY_HOSTS)
    assert result.output == expected.output
    assert drafted_logprobs == logprobs
    assert bool(logprobs) == (name == "logprobs")
    assert result.sweeps <= expected.sweeps
    if name == "wide tree":
        assert result.accepted > 0, "some draft tokens are accepted, or nothing is tested here"
        assert result.sweeps < expected.sweeps


def test_hosts_draft_most_tokens_of_a_grammar(client: Client) -> None:
    """The drafter may know nothing of it."""
    line = {"const": "the sea was calm and the old ship lay still"}
    fields = {"captain": line, "crew": {"enum": [7, 12]}, "mate": line}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    settings: dict[str, Any] = {"max_tokens": 150, "seed": 5, "json_schema": json.dumps(schema)}
    for temperature in (0.0, 1.2):
        settings["temperature"] = temperature
        expected = client.generate(PROMPT, mode="ar", **settings)
        result = client.generate(PROMPT, draft=8, **settings, **BY_HOSTS)  # the best number depends on the time
        assert result.output == expected.output
        assert b"old ship" in result.output
        assert result.sweeps < expected.sweeps / 2


@pytest.mark.parametrize("client", ["a copy, 3"], indirect=True)
def test_drafts_of_a_copy_of_the_model_are_nearly_always_accepted(client: Client) -> None:
    """Its products are of 8 bits, where the processor has such."""
    result = client.generate(PROMPT, max_tokens=60, seed=5, draft=10, **BY_HOSTS)
    assert result.output == client.generate(PROMPT, mode="ar", max_tokens=60, seed=5).output
    assert result.sweeps <= 30, "a trip brings two tokens at least, and up to ten"


def test_a_long_prompt_and_its_cached_repetition_give_the_text_of_ar(client: Client) -> None:
    """The prompt travels in pieces, and the hosts have its beginning in memory the second time."""
    prompt = "The sea was calm, and the ship lay still. " * 7
    expected = client.generate(prompt, mode="ar", max_tokens=30, seed=4).output
    for _ in range(3):
        assert client.generate(prompt, max_tokens=30, seed=4, draft=30, branches=8, **BY_HOSTS).output == expected


@pytest.mark.parametrize("step", ["read", "draft"])
def test_a_failing_drafter_does_not_change_the_text(client: Client, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    expected = client.generate(PROMPT, mode="ar", max_tokens=20, seed=3)

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Drafter, step, fail)
    result = client.generate(PROMPT, max_tokens=20, seed=3, **BY_HOSTS)
    assert (result.output, result.drafted, result.replays) == (expected.output, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["a copy, 3"], indirect=True)
def test_two_hundred_texts_are_those_of_ar(client: Client) -> None:
    """Eight at once, at temperatures from 0 to 1.4."""

    async def written(mode: str) -> list[bytes]:
        places = asyncio.Semaphore(8)
        async with AsyncClient(client.address) as opened:

            async def one(seed: int) -> bytes:
                asked = {"seed": seed, "temperature": seed % 8 / 5, "max_tokens": 20 + seed % 30}
                async with places:
                    return (await opened.generate(PROMPT[: 1 + seed % 28], mode=mode, **asked)).output

            return await asyncio.gather(*map(one, range(200)))

    expected = asyncio.run(written("ar"))
    assert asyncio.run(written("ar-speculative")) == expected
    assert len(set(expected)) > 100
