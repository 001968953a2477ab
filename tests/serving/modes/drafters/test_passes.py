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

from serving.modes.drafters.local_model import DraftJob, LocalModel, LocalSequence
from serving.modes.resample import write_candidates
from stages.backends.whole_model import Continuations
from stages.checkpoint.checkpoint import load_ar
from stages.model.resampling import Candidates
from stages.wire.status import StatusError
from tests.conftest import eventually
from tests.serving.pretrained import write_model

TEXT = b"The sea was calm. The sea was "
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
    return await write_candidates(sequence(model, seed, temperature), encoded(model, text), length, count, 0)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 9), (17, 1), (20, 12)])
def test_candidates_have_the_probs_of_the_model(bundles: Path, length: int, count: int) -> None:
    local = LocalModel(bundles / "scored" / "local")
    drafted = asyncio.run(write_candidates(LocalSequence(local, 400, 0.8, 3), TEXT, length, count, 0))
    tokens = torch.tensor([list(TEXT + text) for text in drafted.texts])
    with torch.inference_mode():
        logits = load_ar(bundles / "scored" / "local")(tokens[:, :-1])[:, len(TEXT) - 1 :]
    nats = (logits.double() / 0.8).log_softmax(dim=-1).gather(2, tokens[:, len(TEXT) :, None])[..., 0]
    assert drafted.nats == pytest.approx(nats.numpy(), abs=1e-3)


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
        if len(pieces) == 2 or any(guilty == 2 and forks is jobs[1].written._forks for forks, _ in pieces):
            raise RuntimeError("boom")
        return whole(pieces)

    monkeypatch.setattr(model, "read", read)
    one, two = asyncio.run(together(model, jobs))
    assert isinstance(one, Candidates)
    assert one.texts == alone[0].texts
    if guilty:
        assert isinstance(two, RuntimeError)
    else:
        assert isinstance(two, Candidates)
        assert two.texts == alone[1].texts


# Memory


def job_of(model: LocalModel, seed: int, cache_bytes: int, opened: Callable[[], object]) -> DraftJob:
    """A job that calls `opened`, on the compute thread, when it gets its memory."""
    text, length, count, temperature = REQUESTS[seed]

    class Written(Continuations):
        def open(self) -> None:
            if self._forks is None:
                opened()
            super().open()

    written = Written(model.open(200), encoded(model, text), temperature, seed, length, count)
    return DraftJob(written, float("inf"), cache_bytes)


async def together(model: LocalModel, jobs: Sequence[DraftJob]) -> list[Candidates | BaseException]:
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
        assert isinstance(other, Candidates)
        assert one.texts == other.texts
        assert np.array_equal(one.nats, other.nats)
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
    assert [type(outcome) for outcome in outcomes] == [Candidates, error, Candidates]
    assert begun == [1]
