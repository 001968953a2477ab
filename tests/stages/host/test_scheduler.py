"""The scheduler: who takes part in a pass, how many may be under way, and on which thread it is computed."""

import threading
import time
from queue import SimpleQueue

import pytest

from stages.host import drafter as drafters
from stages.host import scheduler as engines
from stages.host.drafter import RunAhead
from stages.host.host import batching_wait_s
from stages.host.parts import Parts
from stages.host.scheduler import PASS_ROWS, ScheduledHop, Scheduler
from stages.host.sessions import SessionStore
from stages.host.validation import parse_hop
from stages.model.prefill import READ_POSITIONS
from stages.model.scoring import BRANCH_ROWS
from stages.v1 import stage_pb2
from tests.conftest import PATIENCE_S
from tests.stages.hops import Hops, Make, scores, steps, sweeps
from tests.stages.slow_runner import Paced, alone, watched


def test_hops_that_arrive_together_share_every_pass(parts: Parts) -> None:
    engine = Paced(parts)
    for i in range(5):
        engine.begin(str(i), sweeps(seed=i, chunks=(8 + i,)))
    engine.finish()
    for i in range(3):
        assert set(watched(parts, i).counts("denoise")) == {5}
        assert watched(parts, i).counts("read") == [5]


def test_a_hop_joins_the_next_pass_with_hops_at_other_noise_levels(parts: Parts) -> None:
    engine = Paced(parts)
    engine.begin("early", sweeps())
    engine.begin("late", sweeps(seed=1), at=2)
    engine.finish()
    first, *others = (pieces for method, pieces in watched(parts, 0).calls if method == "denoise")
    assert (len(first), [len(pieces) for pieces in others]) == (1, [2, 1])
    early, late = others[0]
    assert early.sigma < late.sigma
    assert [name for name, _ in engine.order] == ["early", "late"]
    assert engine.order[1][1] == engine.order[0][1] + 1


def test_a_long_prompt_does_not_hold_up_a_step(parts: Parts) -> None:
    """A pass takes one piece of each prompt, so a byte that is due goes out with the very pass that it joins."""
    engine = Paced(parts)
    engine.begin("long", steps(prompt=bytes(4 * READ_POSITIONS - 8), count=1))
    engine.begin("sweep", sweeps(prompt=bytes(3 * READ_POSITIONS), chunks=(100,)))
    engine.begin("short", steps(count=6))
    engine.finish()
    assert [at for name, at in engine.order if name == "short"] == [1, 2, 3, 4, 5, 6]
    assert ("long", 4) in engine.order
    assert max(len(p.source) for _, pieces in watched(parts, 0, "ar").calls for p in pieces) == READ_POSITIONS
    reads = [pieces for method, pieces in watched(parts, 0).calls if method == "read"]
    assert [len(piece.source) for pieces in reads for piece in pieces] == [READ_POSITIONS] * 3


def test_steps_go_through_all_stages_of_the_host_in_one_pass_and_together(parts: Parts) -> None:
    engine = Paced(parts)
    for i in range(7):
        engine.begin(str(i), steps(seed=i, count=3))
    engine.finish()
    assert {at for _, at in engine.order} == {1, 2, 3}
    for stage in range(3):
        assert watched(parts, stage, "ar").counts("read") == [7, 7, 7]
    assert watched(parts, 2, "ar").counts("next_byte") == [7, 7, 7]


def test_the_oldest_sweeps_fill_a_pass_first(parts: Parts) -> None:
    engine = Paced(parts)
    for name in "abcdefg":
        engine.begin(name, sweeps(prompt=b"x", chunks=(100,), seed=ord(name)))
    engine.finish()
    assert [name for name, _ in engine.order] == list("abcdefg")
    passes = [at for _, at in engine.order]
    assert passes[0] == passes[2] < passes[3] == passes[5] < passes[6]
    for i in range(3):
        rows = [[len(piece.z) for piece in pieces] for method, pieces in watched(parts, i).calls if method == "denoise"]
        assert max(sum(sizes) for sizes in rows) == 300
        assert all(sum(sizes[:-1]) < PASS_ROWS for sizes in rows), "a sweep more than fits"


def test_sweeps_do_not_hold_up_steps(parts: Parts) -> None:
    engine = Paced(parts)
    for i in range(6):
        engine.begin(f"sweep {i}", sweeps(chunks=(120,)))
    engine.begin("step", steps(count=5), at=3)
    engine.finish()
    assert [at for name, at in engine.order if name == "step"] == [3, 4, 5, 6, 7]


def test_candidates_do_not_hold_up_steps(parts: Parts) -> None:
    """They are evaluated in pieces of whole branches, beside the steps of others."""
    engine = Paced(parts)
    engine.begin("scores", scores(chunks=(32,), count=32))
    engine.begin("step", steps(count=8))
    engine.finish()
    assert [at for name, at in engine.order if name == "step"] == list(range(1, 9))
    for stage in range(3):
        branched = [pieces for method, pieces in watched(parts, stage, "ar").calls if method == "branch"]
        assert [tuple(piece.source.shape[:2]) for (piece,) in branched] == [(8, 31)] * 4
    heads = [
        len(piece) for method, pieces in watched(parts, 2, "ar").calls if method == "next_byte" for piece in pieces
    ]
    assert max(heads) == BRANCH_ROWS
    assert sum(heads) == 1 + 32 * 31 + 8


def test_with_a_batch_of_one_hops_are_computed_in_turn(parts: Parts) -> None:
    engine = Paced(parts, most_hops=1)
    engine.begin("a", sweeps())
    engine.begin("b", steps(count=1))
    engine.begin("c", sweeps(seed=1))
    engine.finish()
    assert [name for name, _ in engine.order] == ["a", "b", "c"]
    calls = [call for part in range(3) for call in watched(parts, part).calls]
    assert {len(pieces) for _, pieces in calls} == {1}
    owners = [id(pieces[0].caches) for _, pieces in watched(parts, 0).calls]
    assert owners == sorted(owners, key=owners.index), "they took turns"


def test_shares_of_passes_do_not_exceed_the_elapsed_time(parts: Parts) -> None:
    engine = Paced(parts)
    begin = time.perf_counter()
    jobs = [engine.begin(str(i), sweeps(seed=i)) for i in range(4)]
    engine.finish()
    elapsed_ms = (time.perf_counter() - begin) * 1000
    assert all(job.compute_ms > 0 and job.queue_ms >= 0 for job in jobs)
    assert sum(job.compute_ms for job in jobs) <= elapsed_ms
    assert all(job.compute_ms + job.queue_ms <= elapsed_ms for job in jobs)


def job_of(engine: Scheduler, parts: Parts, hops: Hops) -> ScheduledHop:
    """A request's first hop, submitted."""
    hop = next(hops)
    session = SessionStore(1 << 30, 60.0).open("s", "r", hop.router, hop.capacity, parts, 0.0)
    hop.digest = parts.plan.models[hop.router].digest
    job = ScheduledHop(parse_hop(hop, parts.plan), session, 0, time.monotonic() + PATIENCE_S)
    engine.submit(job)
    return job


def test_a_sweep_is_computed_on_the_thread_which_then_sleeps(whole: Parts) -> None:
    engine, ended = Scheduler(3, 64, 64), SimpleQueue[list[ScheduledHop]]()
    thread = threading.Thread(target=engine.run, args=(ended.put,), daemon=True)
    thread.start()
    for _ in range(3):  # between them there is nothing to do
        job = job_of(engine, whole, sweeps())
        assert engine.go() == []
        assert ended.get(timeout=PATIENCE_S) == [job]
        assert isinstance(job.result, stage_pb2.Event)
    engine.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def quick(whole: Parts, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Parts whose warm-up was quick."""
    monkeypatch.setitem(whole.quick_rows, whole.plan.models["ar"].digest, engines.QUICK_ROWS)
    return whole


def test_a_quick_step_is_computed_at_once(whole: Parts, quick: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUICK_MS", 1000.0)  # this machine may be busy
    engine, expected = Scheduler(3, 64, 64), alone(whole, steps(count=1))
    for _ in range(3):
        job = job_of(engine, whole, steps(count=1))
        assert engine.go() == [job]
        assert isinstance(job.result, stage_pb2.Event)
        assert job.result.text == expected
    assert len(engine) == 0


@pytest.mark.parametrize(
    ("hops", "quick_ms"),
    [
        (sweeps, engines.QUICK_MS),
        (lambda: steps(prompt=bytes(engines.QUICK_ROWS + 1)), engines.QUICK_MS),
        (scores, engines.QUICK_MS),
        (steps, 0.0),
    ],
    ids=["sweep", "long prompt", "candidates", "slow model"],
)
def test_slow_hops_are_left_to_the_thread(whole, quick, monkeypatch, hops: Make, quick_ms: float) -> None:
    monkeypatch.setattr(engines, "QUICK_MS", quick_ms)
    engine = Scheduler(3, 64, 64)
    job = job_of(engine, whole, hops())
    assert (engine.go(), len(engine), job.result) == ([], 1, None)


@pytest.mark.parametrize(
    ("others", "stepping", "pass_ms", "wait_ms"),
    [
        ([], 6, 1.5, 1.5),
        ([], 5, 1.5, 0.0),
        ([], 6, 0.0, 0.0),
        ([], 6, engines.QUICK_MS, 0.0),
        ([steps] * 4, 15, 1.5, 0.0),
        ([steps] * 4, 18, 1.5, 1.5),
        ([sweeps], 18, 1.5, 0.0),
    ],
    ids=["few", "its share", "before the first pass", "slow model", "with others", "too few others", "beside a sweep"],
)
def test_few_steps_wait_for_those_of_other_texts(whole, others, stepping: int, pass_ms: float, wait_ms: float) -> None:
    engine = Scheduler(3, 64, 64)
    assert batching_wait_s(engine.arrived, stepping, pass_ms) == 0
    for make in [steps, *others]:
        job_of(engine, whole, make()).work.hop.path.extend(["a", "b", "c"])
    assert batching_wait_s(engine.arrived, stepping, pass_ms) * 1000 == pytest.approx(wait_ms)


def test_a_quick_step_joins_the_pass_under_way(whole: Parts) -> None:
    """It shares the sweeps' next pass, instead of computing beside them."""
    engine = Scheduler(3, 64, 64)
    job_of(engine, whole, sweeps())
    engine._turn()  # the thread is between two passes
    job = job_of(engine, whole, steps())
    assert (engine.go(), len(engine)) == ([], 2)
    assert engine._turn() == [job]


def test_a_hop_of_a_batch_request_gives_way_and_does_not_starve(whole: Parts) -> None:
    engine = Scheduler(3, 64, 64)
    batch, usual = (job_of(engine, whole, sweeps(seed=i)) for i in range(2))
    batch.work.hop.batch = True
    ended: list[ScheduledHop] = []
    while not ended:
        ended = engine._turn()
    assert ended == [usual]
    for _ in range(200):  # with other work in every pass
        job_of(engine, whole, steps(count=1))
        ended += engine._turn()
    assert batch in ended


def drafted() -> Hops:
    """The first hop of a text that the host drafts for."""
    hop = next(steps(count=20))
    hop.read.sample.MergeFrom(stage_pb2.Sample(remaining=20, drafting=stage_pb2.Drafting(most=4)))
    yield hop


def test_a_hop_does_not_wait_for_drafting_ahead(whole: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions take turns, a token each, and a hop that arrives is next."""
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    engine, order, ended = Scheduler(3, 64, 64), list[RunAhead](), list[ScheduledHop]()
    first, second = (job_of(engine, whole, drafted()) for _ in range(2))
    arrived = list[tuple[ScheduledHop, int]]()

    def drafts(ahead: RunAhead) -> bool:
        order.append(ahead)
        if len(order) == 3:
            arrived.append((job_of(engine, whole, steps(count=1)), len(order)))
        if len(order) == 8:
            engine.stop()
        return True

    def deliver(jobs: list[ScheduledHop]) -> None:
        ended.extend(jobs)
        assert len(order) == (3 if arrived else 0)

    monkeypatch.setattr(RunAhead, "step", drafts)
    engine.run(deliver)
    assert ended == [first, second, arrived[0][0]]
    assert all(job.session.draft is not None and job.session.draft.ahead in order for job in (first, second))
    assert order == [order[0], order[1]] * 4
    assert len(engine) == 0, "it is no hop under way"


@pytest.mark.parametrize("why", ["released", "verdict", "failed", "finished"])
def test_nothing_is_drafted_ahead_for_a_session_that_ended(
    whole: Parts, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    engine = Scheduler(3, 64, 64)
    job = job_of(engine, whole, drafted())
    assert engine._turn() == [job]
    ahead = job.session.draft.ahead
    assert ahead is not None
    engine.turn()
    assert len(engine._ahead) == 1
    job.session.released = why == "released"
    job.session.next_number += 2 * (why == "verdict")
    if why == "failed":
        ahead.grower.text = None  # type: ignore[assignment]
    for _ in range(10 if why == "finished" else 2 if why == "failed" else 1):
        engine.turn()
    assert not engine._ahead
    assert (job.session.draft is None) == (why == "failed")
    assert ahead.growth.levels == (4 if why == "finished" else 0)


@pytest.mark.parametrize("idle", [0, 1, 3, 9])
def test_drafting_ahead_does_not_change_the_text(whole: Parts, monkeypatch: pytest.MonkeyPatch, idle: int) -> None:
    """The host has nothing else to do for some turns while a draft travels. Its near model is seldom right."""
    monkeypatch.setattr(drafters, "AHEAD_CHANCE", 0.0)
    engine, text = Scheduler(3, 64, 64), b""
    job = job_of(engine, whole, drafted())
    while engine._turn():
        event = job.work.result or job.result
        assert isinstance(event, stage_pb2.Event)
        text += event.text
        for _ in range(idle):
            engine.turn()
        if isinstance(job.result, stage_pb2.Hop):
            job.session.next_number += 1
            job = ScheduledHop(parse_hop(job.result, whole.plan), job.session, 0, job.due_at)
            engine.submit(job)
    assert text == alone(whole, steps(count=20))
