"""Fault schedules in virtual time: nothing is lost, a seed decides all, and what fails is found and shrunk."""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest.simulation import search as searching
from loadtest.simulation.loop import Process, virtual_time
from loadtest.simulation.processes import Remembered, VirtualLoader
from loadtest.simulation.schedule import (
    ALONE_AT,
    ALONE_EVERY,
    COORDINATOR,
    HOSTS,
    KINDS,
    ROUTER_NAMES,
    Asked,
    PlannedFault,
    Schedule,
    make_schedule,
)
from loadtest.simulation.search import Weights, fate_of, search, shrink, trouble_of
from loadtest.simulation.world import CASES, PATIENCE_S, RequestOutcome
from serving.router.journal import Journal, Tries
from serving.router.paths import Suspects
from stages.backends.base import CleanPiece
from stages.clock import monotonic
from stages.host.sessions import SessionStore
from stages.model.layers import LayerCache
from trainer.rounds.store import Store

SCHEDULES = 12
EACH_ONCE = (tuple(Asked(case, 0.0) for case in range(0, len(CASES), 3)),)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


def trouble(weights: Weights, schedule: Schedule) -> tuple[str, ...]:
    return trouble_of(schedule, weights.run(schedule), weights.answers)


def faulty(*faults: PlannedFault, routers: tuple[str, ...] = ROUTER_NAMES) -> Schedule:
    return Schedule(0, EACH_ONCE, (routers,), faults)


# Time


def test_time_jumps_to_the_next_timer_and_a_halted_process_runs_later() -> None:
    with virtual_time() as loop:
        one, other, seen = Process(loop, "a"), Process(loop, "b"), list[tuple[str, float]]()

        async def sleeps(name: str, seconds: float) -> None:
            begin_s = monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.Future()
            seen.append((name, round(monotonic() - begin_s)))

        async def run() -> None:
            tasks = [one.start(sleeps("one", 3600.0)), other.start(sleeps("other", 7200.0))]
            loop.call_later(60.0, setattr, one, "halted", True)
            loop.call_later(61.0, one.jump, 600.0)
            await tasks[1]
            one.resume()
            await tasks[0]

        loop.run_until_complete(run())
    assert seen == [("other", 7200), ("one", round(7200 * one.rate / other.rate) + 600)]


def test_a_deadlock_is_an_error() -> None:
    with virtual_time() as loop, pytest.raises(RuntimeError, match="is deadlocked"):
        loop.run_until_complete(loop.create_future())


# Schedules


def test_arithmetic_is_computed_once_for_each_input(weights: Weights) -> None:
    """To the last bit: caches that differ in one number are another input."""
    runner, calls, found = weights.releases[0].parts[1].runners["ar"][1]._runner, list[int](), list[Any]()
    remembered = Remembered(SimpleNamespace(read=lambda pieces: calls.append(len(found)) or runner.read(pieces)))
    for number in (0.5, 0.5, 0.25):
        cache = LayerCache(*torch.zeros(2, 1, 2, 4, 16))
        cache.keys[0, 0, 0, 0], cache.length = number, 1
        (result,) = remembered.read([CleanPiece(torch.ones(2, 32), [cache])])
        found.append((result.tolist(), cache.keys.tolist(), cache.values.tolist(), cache.length))
    assert calls == [0, 2]
    assert found[0] == found[1] != found[2]


def test_a_seed_decides_a_schedule_that_can_be_survived() -> None:
    kinds = Counter[str]()
    for seed in range(300):
        schedule = make_schedule(seed, len(CASES))
        assert schedule == make_schedule(seed, len(CASES))
        kinds.update(fault.kind for fault in schedule.faults)
        if schedule.trains:
            continue
        gone = [fault for fault in schedule.faults if fault.kind in ("kill", "replace", "freeze")]
        killed = {fault.targets[0] for fault in gone}
        assert not killed & {name for known in schedule.routers if len(known) == 1 for name in known}
        is_alone = seed % ALONE_EVERY == ALONE_AT  # a stage has one host, which only stands still
        assert is_alone or all({f"{stage}-1", f"{stage}-2"} - killed for stage in "abc")
    assert kinds.keys() == KINDS.keys()


def test_the_same_seed_gives_the_same_events(weights: Weights) -> None:
    found_faults = 38, 134, 352, 781, 9000422, 9001080, 9103128, 9300547, 9910624
    schedules = [make_schedule(seed, len(CASES)) for seed in (*range(SCHEDULES), *found_faults)]
    runs = [weights.run(schedule) for schedule in schedules]
    judged = [trouble_of(*each, weights.answers) for each in zip(schedules, runs, strict=True)]
    assert judged == [()] * len(schedules)
    again = [weights.run(schedule) for schedule in schedules[-3:]]
    assert [run.events for run in again] == [run.events for run in runs[-3:]]
    assert len({run.events for run in runs}) == len(schedules)


@pytest.mark.parametrize(
    "faults",
    [
        [PlannedFault("kill", ("b-1",), 0.6, 60.0), PlannedFault("kill", ("b-2",), 0.9, 0.5)],
        [PlannedFault("freeze", ("a-1",), 0.1, 6.0), PlannedFault("freeze", ("c-1",), 0.2, 6.0)],
        [PlannedFault("cut", ("a-1", "b-1"), 0.1, 20.0), PlannedFault("cut", ("router-1", "c-1"), 0.2, 20.0)],
        [PlannedFault("freeze", ("router-1",), 0.1, 30.0), PlannedFault("kill", ("a-1",), 0.2, 1.0)],
        [PlannedFault("reset", (one, other), 0.4, 0.0) for one in ROUTER_NAMES for other in HOSTS],
        [PlannedFault("freeze", ("a-1",), 0.1, 6.0), PlannedFault("kill", ("a-1",), 0.5, 0.1)],
        [PlannedFault("slow", ("b-1",), 0.0, 60.0, 50.0), PlannedFault("one-way", ("c-1", "router-1"), 0.5, 9.0)],
        [PlannedFault("freeze", ("b-1",), 1.0, 2.3), PlannedFault("broken", ("a-2",), 0.0, 60.0)],
        [PlannedFault("kill", ("b-1",), 5.4, 9.0)],
    ],
    ids=[
        "both replicas",
        "two frozen hosts",
        "two cut links",
        "a frozen router",
        "all connections reset",
        "a frozen host is killed",
        "lost results",
        "a lost host and a broken one",
        "a scored prompt is read again",
    ],
)
def test_requests_survive_every_listed_fault(weights: Weights, faults: list[PlannedFault]) -> None:
    run = weights.run(faulty(*faults))
    assert trouble_of(faulty(*faults), run, weights.answers) == ()
    assert {outcome.status for outcome in run.outcomes} == {"OK"}
    assert sum(outcome.replays for outcome in run.outcomes) >= 1


@pytest.mark.parametrize("kind", ["leave", "hurry"])
def test_a_client_that_leaves_or_times_out_frees_the_hosts(weights: Weights, kind: str) -> None:
    run = weights.run(schedule := faulty(PlannedFault(kind, ("client-1",), 0.0, 9.0)))
    assert trouble_of(schedule, run, weights.answers) == ()
    assert {"leave": "LEFT", "hurry": "DEADLINE_EXCEEDED"}[kind] in {outcome.status for outcome in run.outcomes}


def test_a_request_survives_a_reset_to_its_only_router(weights: Weights) -> None:
    resets = [PlannedFault("reset", ("client-1", "router-1"), at_s, 0.0) for at_s in (0.001, 0.1, 0.2)]
    assert trouble(weights, faulty(*resets, routers=("router-1",))) == ()


@pytest.mark.parametrize("at_s", [0.1, 0.5, 0.6, 0.7, 1.0, 1.2, 1.5])
def test_a_coordinator_killed_while_it_writes_loses_no_update(weights: Weights, at_s: float) -> None:
    torn = [PlannedFault("torn", (COORDINATOR,), at_s + i, 0.5, share) for i, share in enumerate((3.7, 2.0, 1.9))]
    assert trouble(weights, Schedule(0, (), (), tuple(torn), trains=True)) == ()


def test_updates_accepted_before_they_are_stored_are_found(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Store.commit

    def forgetful(store: Store, record: Any) -> None:
        if record["kind"] != "accepted":
            commit(store, record)

    monkeypatch.setattr(Store, "commit", forgetful)
    assert "is not stored" in " ".join(trouble(weights, Schedule(0, (), (), (), trains=True)))


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({}, "right"),
        ({"text": b"calm"}, "wrong"),
        ({"text": b"calm", "status": "UNAVAILABLE"}, "lost"),
        ({"text": b"cold", "status": "LEFT"}, "wrong"),
        ({"text": b"", "status": "LEFT"}, "left"),
        ({"text": b"", "status": "DEADLINE_EXCEEDED", "took_s": PATIENCE_S}, "hurried"),
        ({"text": b"", "status": "DEADLINE_EXCEEDED", "took_s": 1.0}, "lost"),
        ({"took_s": PATIENCE_S + 1.0}, "late"),
        ({"took_s": 1.8}, "right"),
        ({"took_s": 2.0}, "slow"),
        ({"took_s": 1.8, "places": frozenset({"b-2"})}, "slow"),
        ({"begun_s": 7.0, "took_s": 1.4}, "slow"),
        ({"extra": frozenset({0.5})}, "wrong"),
        ({"previews": frozenset({(0, b"calm")})}, "wrong"),
        ({"replays": 2}, "right"),
        ({"replays": 3}, "moved"),
        ({"begun_s": 7.0, "replays": 1}, "moved"),
        ({"text": b"rough"}, "right"),
        ({"text": b"", "status": "ABORTED"}, "between releases"),
    ],
)
def test_every_outcome_is_classified(changes: dict[str, Any], fate: str) -> None:
    """Host b-1 died after 0.5 s, for 5 s; a release with other texts was deployed meanwhile."""
    outcome = RequestOutcome(0, "OK", b"calm sea", 0.0, 1.0, PATIENCE_S, 0, frozenset({"b-1"}))
    answers = (outcome, replace(outcome, text=b"rough"))
    assert fate_of(replace(outcome, **changes), answers, faulty(PlannedFault("kill", ("b-1",), 0.5, 5.0))) == fate


def test_a_deployment_is_whole_or_not_at_all(weights: Weights) -> None:
    """A host dies under it: that deployment is given up, the next one is not, and each text is of one release."""
    assert {name for name in vars(VirtualLoader) if name.startswith("_load")} < vars(VirtualLoader.__base__).keys()
    kill = PlannedFault("kill", ("b-1",), 0.5, 20.0)
    for faults, failure in (((), ""), ((kill,), "b-1")):
        run = weights.run(schedule := replace(faulty(*faults), deploy_at_s=0.3))
        assert trouble_of(schedule, run, weights.answers) == ()
        assert (failure in run.deploy, bool(run.deploy)) == (True, bool(failure))
        assert {each.text for each in run.after} == {weights.answers[each.case][1].text for each in run.after}


@pytest.mark.parametrize("name", ["a-1", "router-2"])
def test_a_deployment_succeeds_again_after_a_torn_write(weights: Weights, name: str) -> None:
    run = weights.run(schedule := replace(faulty(PlannedFault("torn", (name,), 0.2, 9.0, 0.5)), deploy_at_s=0.3))
    assert trouble_of(schedule, run, weights.answers) == ()
    assert run.deploy  # the process ended in the middle of it


def test_a_key_gets_no_more_than_its_bytes_per_day(weights: Weights) -> None:
    run = weights.run(schedule := faulty(PlannedFault("day", ("router-1",), 0.5, 60.0), routers=("router-1",)))
    assert trouble_of(schedule, run, weights.answers) == ()
    assert {each.status for each in run.outcomes} == {"OK", "RESOURCE_EXHAUSTED"}
    assert {each.status for each in run.after} == {"OK"}


def test_a_planted_fault_is_found_and_shrunk(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that forgets, when its request is moved, the last byte that hosts wrote."""
    replay = Journal.replay

    def forgetful(journal: Journal) -> Any:
        journal._written = journal._written[:-1]
        return replay(journal)

    kill, slow = PlannedFault("kill", ("b-1",), 0.3, 9.0), PlannedFault("slow", ("c-1",), 0.0, 0.1)
    schedule = replace(faulty(slow, kill, PlannedFault("kill", ("b-2",), 5.0, 0.1)), requests=((Asked(11, 0.0),),) * 1)
    assert trouble(weights, schedule) == ()
    monkeypatch.setattr(Journal, "replay", forgetful)
    assert trouble(weights, schedule)
    assert shrink(weights, schedule).faults == (kill,)


@pytest.mark.parametrize(
    ("where", "name", "instead", "found"),
    [
        (Suspects, "add", lambda *_: None, "takes a link that lost work a moment ago"),
        (Tries, "_blame", lambda self, of, *_: self.blamed.update(e.entry.address for e in of.path), "avoids"),
        (SessionStore, "release", lambda *_: False, "keeps a session that it reported as over"),
    ],
)
def test_rules_of_every_attempt_are_checked(
    weights: Weights, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any, found: str
) -> None:
    schedule = faulty(PlannedFault("full", ("c-1",), 0.0, 9.0))
    monkeypatch.setattr(where, name, instead)
    assert found in " ".join(trouble(weights, schedule))


def test_the_report_names_the_failing_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = search(3, 5)
    assert sound.passed
    assert "3 schedules" in sound.table
    assert "18 requests" in sound.table
    monkeypatch.setattr(searching, "trouble_of", lambda *_: ("lost: a text",))
    report = search(3, 5)
    assert not report.passed
    assert "seed 5 fails" in report.table
    assert "bench chaos --simulate --schedules 1 --seed 5" in report.table
    assert json.loads(json.dumps(report.record))["failing"]["seed"] == 5
