"""`resample`: a fixed number of sweeps, the drafter's text with one candidate, the scorer's with many."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from serving.client.client import Client, Result

LocalRing = Callable[..., AbstractContextManager[Client]]
PROMPTS = (b"x", b"The sea was calm. The sea was ", bytes((7 * i) % 128 for i in range(200)))
REQUESTS: list[dict[str, Any]] = [
    {"seed": 0, "scorer": "chain", "chunk": 8, "candidates": 5},
    {"seed": 1, "scorer": "ar", "chunk": 1, "candidates": 3},
    {"seed": 2, "scorer": "chain", "chunk": 20, "candidates": 64, "temperature": 2.0},
    {"seed": 3, "scorer": "chain", "candidates": 1},
    {"seed": 4},
    {"seed": 5, "codec": "int8"},
]


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


def write(client: Client, prompt: bytes = PROMPTS[1], **settings: Any) -> Result:
    result = client.generate(prompt, mode="resample", **{"max_bytes": 40, "codec": "fp32", **settings})
    assert result.output_bytes == len(result.output)
    assert 1 <= result.effective_samples <= result.candidates
    return result


@pytest.fixture(scope="module")
def references(ring: Client) -> list[bytes]:
    return [write(ring, **request).output for request in REQUESTS]


# One text


def test_the_same_request_gives_the_same_text(ring: Client, references: list[bytes]) -> None:
    assert [write(ring, **request).output for request in REQUESTS] == references
    assert len(set(references)) == len(references)


@pytest.mark.parametrize("hosts", [1, 2])
def test_it_does_however_the_hosts_share_the_model(
    bundles: Path, local_ring: LocalRing, references: list[bytes], hosts: int
) -> None:
    with local_ring(bundles / "scored", hosts) as client:
        assert [write(client, **request).output for request in REQUESTS] == references


def test_company_changes_nothing(ring: Client, references: list[bytes]) -> None:
    found: dict[int, bytes] = {}

    def ask(index: int) -> None:
        found[index] = write(ring, **REQUESTS[index % len(REQUESTS)]).output

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2 * len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(2 * len(REQUESTS))] == 2 * references


# What it costs


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "words", "long"])
@pytest.mark.parametrize(("max_bytes", "chunk"), [(40, 40), (40, 13), (41, 8), (1, 8), (5, 1), (3, 300)])
def test_a_chunk_is_a_trip(lone: Client, prompt: bytes, max_bytes: int, chunk: int) -> None:
    result = write(lone, prompt, max_bytes=max_bytes, chunk=chunk, candidates=4)
    assert result.sweeps == -(-max_bytes // chunk), "the prompt travels with the first candidates"
    assert (result.output_bytes, result.chunk, result.candidates) == (max_bytes, min(chunk, max_bytes), 4)


def test_by_default_256_bytes_take_at_most_9_trips(lone: Client) -> None:
    for scorer in ("chain", "ar"):
        result = write(lone, max_bytes=256, scorer=scorer, temperature=0.8)
        assert result.sweeps <= 9
        assert result.scorer == scorer
        assert result.divergence_bits > 1, "these models have little in common"


def test_a_drafter_that_is_close_makes_longer_chunks(lone: Client) -> None:
    result = write(lone, max_bytes=256, temperature=20.0)
    assert result.divergence_bits < 0.02
    assert result.chunk > 32
    assert result.sweeps < 8


def test_everything_is_booked(ring: Client) -> None:
    result = ring.generate(PROMPTS[1], mode="resample", max_bytes=40, chunk=20, candidates=16)
    assert (result.mode, result.scorer, result.sweeps, result.hops) == ("resample", "chain", 2, 8)
    assert result.compute_ms > sum(host.compute_ms for host in result.hosts), "the drafter's own share"
    hidden = (16 * 19 + 30) * (32 + 28)
    assert hidden < result.wire_bytes[1] < hidden + 16 * 20 + 1000, "int8 hidden states unless asked for others"
    pieces = list(ring.stream(PROMPTS[1], mode="resample", max_bytes=40, chunk=20, candidates=16))
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == result.output
    assert len(pieces) == 3


def test_a_text_up_to_the_end_of_the_context(lone: Client) -> None:
    prompt = bytes(range(1, 100)) * 4
    assert write(lone, prompt, max_bytes=512 - 396).output_bytes == 116


# The law


def texts_of_three(client: Client, **settings: Any) -> list[bytes]:
    settings = {"mode": "resample", "max_bytes": 3, "temperature": 2.0, **settings}
    return [client.generate(b"x", seed=seed, **settings).output for seed in range(200)]


@pytest.mark.slow
def test_one_candidate_is_the_drafters_text(bundles: Path, lone: Client, three_bytes: Any) -> None:
    scorer, local = (bundles / "scored" / name for name in ("scorer", "local"))
    texts = texts_of_three(lone, candidates=1)
    law = three_bytes(scorer, local, b"x", 2.0)
    assert law.probability(texts, other=True) > 1e-3
    assert law.probability(texts) < 1e-6, "the test can tell them apart"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
def test_many_candidates_are_the_scorers(bundles: Path, lone: Client, three_bytes: Any, chunk: int) -> None:
    scorer, local = (bundles / "scored" / name for name in ("scorer", "local"))
    texts = texts_of_three(lone, candidates=128, chunk=chunk)
    law = three_bytes(scorer, local, b"x", 2.0)
    assert law.probability(texts) > 1e-3
    assert law.probability(texts, other=True) < 1e-6
