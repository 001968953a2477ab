"""`verified` writes what the scorer would: exactly its odds, the same text however much is guessed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.client.client import Client, Result
from stages.checkpoint.checkpoint import load_ar

LocalRing = Callable[..., AbstractContextManager[Client]]
PROMPTS = (b"x", b"The sea was calm. The sea was ", bytes((7 * i) % 128 for i in range(200)))
LENGTHS = (1, 4, 16, 40, 64, None)
OUTPUT = 33


@pytest.fixture(scope="module")
def ring(bundles: Path, local_ring: LocalRing) -> Iterator[Client]:
    """Three hosts."""
    with local_ring(bundles / "scored", 3) as client:
        yield client


@pytest.fixture(scope="module")
def lone(bundles: Path, local_ring: LocalRing) -> Iterator[Client]:
    """One host."""
    with local_ring(bundles / "scored", 1) as client:
        yield client


def write(client: Client, prompt: bytes, **settings: Any) -> Result:
    result = client.generate(prompt, mode="verified", **{"max_bytes": OUTPUT, "temperature": 1.5, **settings})
    assert result.output_bytes == result.reached, "every byte is a guess that was tried, or what came in its place"
    refused = result.reached - result.accepted
    assert refused <= result.output_bytes
    assert 1 <= result.sweeps <= result.output_bytes
    if (settings.get("draft") or 0) >= result.output_bytes:
        assert refused <= result.sweeps <= refused + 1, "a sweep ends at a refused guess, or at the end"
    return result


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "words", "long"])
def test_the_text_is_the_same_however_much_is_guessed(ring: Client, prompt: bytes) -> None:
    for seed, scorer, temperature in ((0, "chain", 0.8), (1, "ar", 4.0), (2, "chain", 0.0)):
        settings = {"seed": seed, "scorer": scorer, "temperature": temperature}
        results = [write(ring, prompt, draft=draft, **settings) for draft in LENGTHS]
        assert len({result.output for result in results}) == 1, settings
        assert {result.scorer for result in results} == {scorer}
        assert len({result.accepted for result in results}) == 1, "what is refused does not depend on it either"


@pytest.mark.parametrize("hosts", [1, 2])
def test_it_is_however_the_hosts_share_the_model(
    bundles: Path, local_ring: LocalRing, ring: Client, hosts: int
) -> None:
    with local_ring(bundles / "scored", hosts) as client:
        for prompt, draft, seed in zip(PROMPTS, (3, 16, None), range(3), strict=True):
            assert write(client, prompt, draft=draft, seed=seed).output == write(ring, prompt, seed=seed).output


def test_company_changes_nothing(ring: Client) -> None:
    requests = [{"seed": seed, "draft": draft} for seed, draft in zip(range(8), cycle(LENGTHS), strict=False)]
    alone = [write(ring, PROMPTS[1], **request).output for request in requests]
    found: dict[int, bytes] = {}

    def ask(index: int) -> None:
        found[index] = write(ring, PROMPTS[1], **requests[index]).output

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(requests))] == alone


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "words", "long"])
def test_at_temperature_0_it_is_what_the_pipeline_writes(lone: Client, prompt: bytes) -> None:
    plain = lone.generate(prompt, mode="ar", temperature=0.0, max_bytes=OUTPUT)
    assert write(lone, prompt, scorer="ar", temperature=0.0).output == plain.output


@pytest.mark.parametrize("max_bytes", [1, 2])
def test_short_texts(lone: Client, max_bytes: int) -> None:
    for draft in (1, 8, None):
        result = write(lone, b"The sea ", max_bytes=max_bytes, draft=draft)
        assert result.drafted <= result.sweeps * max_bytes


def test_a_text_up_to_the_end_of_the_context(lone: Client) -> None:
    prompt = bytes(range(1, 100)) * 4
    texts = {write(lone, prompt, max_bytes=512 - 396, draft=draft).output for draft in (5, 64)}
    assert len(texts) == 1


def test_int8_hidden_states_are_a_fair_choice(ring: Client) -> None:
    exact, small = (write(ring, PROMPTS[2], codec=codec, draft=8) for codec in ("fp32", "int8"))
    assert small.wire_bytes[1] < exact.wire_bytes[1] / 2, "the hop between two hosts"


def test_a_drafter_that_is_the_scorer_is_never_refused(bundles: Path, tmp_path: Path, local_ring: LocalRing) -> None:
    twin = tmp_path / "twin"
    for name in ("ar", "local"):
        shutil.copytree(bundles / "scored" / "ar", twin / name)
    with local_ring(twin, 1) as client:
        result = write(client, PROMPTS[1], max_bytes=60, temperature=0.8, draft=20)
        assert (result.scorer, result.accepted, result.sweeps) == ("ar", 60, 3)
        local = client.generate(PROMPTS[1], mode="local", max_bytes=60, temperature=0.8)
        assert result.output == local.output, "its guesses are drawn with the numbers that it always draws with"


# The distribution


@pytest.mark.slow
def test_texts_have_the_odds_of_the_scorer(bundles: Path, lone: Client, three_bytes: Any) -> None:
    settings = {"max_bytes": 3, "temperature": 2.0}
    results = [lone.generate(b"x", mode="verified", seed=seed, **settings) for seed in range(150)]
    assert {result.scorer for result in results} == {"chain"}
    accepted = sum(result.accepted for result in results)
    assert 0.1 < accepted / 450 < 0.9, "some guesses stood and some did not"
    scorer, local = (bundles / "scored" / name for name in ("scorer", "local"))
    law = three_bytes(scorer, local, b"x", 2.0)
    assert law.probability([result.output for result in results]) > 1e-3
    drafts = [lone.generate(b"x", mode="local", seed=seed, **settings).output for seed in range(150)]
    assert law.probability(drafts) < 1e-6, "the test can tell the drafter's"


@torch.inference_mode()
def surprise(texts: list[bytes], prompt: bytes, directory: Path, temperature: float) -> float:
    """How far -ln p of texts is from what a model expects of its own, in standard errors.

    The sum of -ln p(x) - H over places is a martingale if the model wrote them, with the sum of Var(-ln p) as variance.
    """
    model, excess, variance = load_ar(directory), 0.0, 0.0
    for text in texts:
        tokens = torch.tensor([list(prompt + text)])
        nats = -(model(tokens[:, :-1]).double() / temperature).log_softmax(dim=-1)[0, len(prompt) - 1 :]
        entropy = (nats.exp().reciprocal() * nats).sum(dim=-1)
        excess += float((nats.gather(1, tokens[0, len(prompt) :, None])[:, 0] - entropy).sum())
        variance += float((nats.exp().reciprocal() * (nats - entropy[:, None]) ** 2).sum())
    return excess / variance**0.5


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["chain", "ar"])
def test_long_texts_are_as_likely_as_the_scorers_own(bundles: Path, lone: Client, scorer: str) -> None:
    settings = {"max_bytes": 256, "temperature": 0.8}
    directory = bundles / "scored" / {"chain": "scorer", "ar": "ar"}[scorer]

    def texts(**mode: Any) -> list[bytes]:
        return [lone.generate(PROMPTS[1], seed=seed, **settings, **mode).output for seed in range(3)]

    assert abs(surprise(texts(mode="verified", scorer=scorer), PROMPTS[1], directory, 0.8)) < 4
    assert abs(surprise(texts(mode="local"), PROMPTS[1], directory, 0.8)) > 8, "the test can tell the drafter's"
