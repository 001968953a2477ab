"""Passes that requests share: each text is the one that its request would write alone."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.modes.candidates import Candidates, write_candidates
from serving.modes.drafters.local_model import LocalModel, LocalSequence
from serving.modes.drafters.passes import BLOCK, DraftJob, Written, draw
from stages.model.randomness import Purpose, uniforms
from stages.wire.status import StatusError
from tests.conftest import eventually
from tests.serving.pretrained import write_model
from tests.stages.statistics import probabilities

# Of each request: its text, length, candidates, temperature.
REQUESTS = [
    (b"The sea was calm.", 20, 5, 0.8),
    (b"It", 1, 9, 0.7),
    (b"He said that ", 33, 1, 1.0),
    (b"The sea was calm." * 6, 12, 16, 0.1),
]


@pytest.fixture(scope="module", params=["bytes", "tokens"])
def model(request: pytest.FixtureRequest, bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    if request.param == "bytes":
        return LocalModel(bundles / "own" / "local")
    directory = tmp_path_factory.mktemp("passes")
    write_model(directory)  # in three stages, with heads that share keys
    return LocalModel(directory)


def encoded(model: LocalModel, text: bytes) -> bytes:
    return model.vocabulary.encode([token % model.vocabulary.size for token in text])


def sequence(model: LocalModel, seed: int, temperature: float = 0.8, due_at: float = float("inf")) -> LocalSequence:
    return LocalSequence(model, 200, temperature, seed, due_at)


async def written(model: LocalModel, seed: int) -> Candidates:
    text, length, count, temperature = REQUESTS[seed]
    return await write_candidates(sequence(model, seed, temperature), encoded(model, text), length, count, seed)


async def test_a_candidate_is_what_it_would_be_alone(model: LocalModel) -> None:
    alone = [await written(model, seed) for seed in range(len(REQUESTS))]

    # they begin at different passes: the compute thread is already at work for those before
    async def late(seed: int) -> Candidates:
        await asyncio.sleep(seed * 0.002)
        return await written(model, seed)

    for one, other in zip(alone, await asyncio.gather(*map(late, range(len(REQUESTS)))), strict=True):
        assert other.texts == one.texts
        assert np.array_equal(other.nats, one.nats), "to the last bit"


async def test_who_goes_leaves_the_pass_and_changes_no_other_text(model: LocalModel) -> None:
    expected = await written(model, 0)
    neighbour = asyncio.create_task(write_candidates(sequence(model, 9), encoded(model, b"It was "), 150, 8, 0))
    mine = asyncio.create_task(written(model, 0))
    await asyncio.sleep(0)  # both have begun
    neighbour.cancel()
    drafted = await mine
    with pytest.raises(asyncio.CancelledError):
        await neighbour
    assert drafted.texts == expected.texts
    assert np.array_equal(drafted.nats, expected.nats)
    await eventually(lambda: not model.passes.busy)  # a request that has gone is not written to its end


async def test_a_deadline_ends_the_writing(model: LocalModel) -> None:
    expected = await written(model, 0)
    late = sequence(model, 1, due_at=time.monotonic() - 1)
    with pytest.raises(StatusError, match="the deadline of this request has passed") as error:
        await write_candidates(late, encoded(model, b"It"), 100, 2, 0)
    assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await written(model, 0)).texts == expected.texts


@pytest.mark.parametrize("guilty", [None, 2])
def test_what_fails_in_company_is_written_alone(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, guilty: int | None
) -> None:
    alone = [asyncio.run(model.passes.draft(job_of(model, seed, 1, list))) for seed in (0, 2)]
    whole, jobs = model.read, [job_of(model, seed, 1, list) for seed in (0, 2)]

    def read(pieces: Sequence[Any]) -> Any:
        if len(pieces) == 2 or any(guilty == 2 and forks is jobs[1]._forks for forks, _ in pieces):
            raise RuntimeError("boom")
        return whole(pieces)

    monkeypatch.setattr(model, "read", read)
    one, two = asyncio.run(together(model, jobs))
    assert isinstance(one, Written)
    assert np.array_equal(one.tokens, alone[0].tokens)
    if guilty:
        assert isinstance(two, RuntimeError)
    else:
        assert isinstance(two, Written)
        assert np.array_equal(two.tokens, alone[1].tokens)


# Memory


def job_of(model: LocalModel, seed: int, cache_bytes: int, opened: Callable[[], object]) -> DraftJob:
    """A job that calls `opened`, on the compute thread, when it gets its memory."""
    text, length, count, temperature = REQUESTS[seed]

    def numbers() -> NDArray[np.float64]:
        opened()
        return uniforms(seed, Purpose.CANDIDATE, 0, length, count)

    return DraftJob(model.open(200), encoded(model, text), temperature, numbers, float("inf"), cache_bytes)


async def together(model: LocalModel, jobs: Sequence[DraftJob]) -> list[Written | BaseException]:
    """What becomes of `jobs`, which are all there when the first is looked at."""
    gate = threading.Event()
    model.compute.submit(gate.wait)
    tasks = [asyncio.create_task(model.passes.draft(job)) for job in jobs]
    await asyncio.sleep(0)
    gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


HALF = LocalModel.max_draft_bytes // 2


def test_jobs_that_do_not_fit_together_are_written_one_after_the_other(model: LocalModel) -> None:
    alone = [asyncio.run(model.passes.draft(job_of(model, seed, 2 * HALF, list))) for seed in range(4)]
    done = list[tuple[bool, ...]]()

    def opened() -> None:
        done.append(tuple(job.done.done() for job in jobs))

    # the third would fit beside the first, but does not overtake the second; the last three fit together
    jobs = [job_of(model, seed, need, opened) for seed, need in enumerate([HALF + 1, HALF + 1, HALF - 2, 1])]
    for one, other in zip(alone, asyncio.run(together(model, jobs)), strict=True):
        assert isinstance(other, Written)
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.probs, other.probs)
    assert done == [(False, False, False, False), *3 * [(True, False, False, False)]]


@pytest.mark.parametrize(
    ("end", "error"),
    [(lambda job: setattr(job, "due_at", 0), StatusError), (lambda job: job.done.cancel(), asyncio.CancelledError)],
)
def test_a_job_that_ends_while_it_waits_for_memory_is_left_out(
    model: LocalModel, end: Callable[[DraftJob], object], error: type[BaseException]
) -> None:
    begun = list[int]()
    first = job_of(model, 0, HALF + 1, lambda: end(waiting))
    waiting, last = (job_of(model, seed, HALF + 1, lambda seed=seed: begun.append(seed)) for seed in (2, 1))
    outcomes = asyncio.run(together(model, [first, waiting, last]))
    assert [type(outcome) for outcome in outcomes] == [Written, error, Written]
    assert begun == [1]


# What is drawn


@given(st.integers(0, 1000), st.sampled_from([3, BLOCK, BLOCK + 1, 5 * BLOCK - 7]), st.floats(1e-16, 1.0))
def test_what_is_drawn_is_where_the_running_sum_reaches_u(seed: int, size: int, u: float) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, seed % size] = -torch.inf
    tokens, probs = draw(logits, torch.full((4, 1), 1 / 0.8), torch.full((4, 1), u, dtype=torch.float64))
    exact = probabilities(logits, 0.8)
    below = exact.cumsum(axis=1)
    for row, (token, share) in enumerate(zip(tokens[:, 0].tolist(), probs[:, 0].tolist(), strict=True)):
        assert share == pytest.approx(exact[row, token], rel=1e-4)
        assert share > 0
        # float32 probs: within rounding of where float64 has it
        assert below[row, token] >= u - 1e-5
        assert below[row, token] - exact[row, token] <= u + 1e-5
