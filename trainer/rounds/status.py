"""A run as those see it who watch."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rounds.coordinator import Coordinator
from trainer.rounds.curve import Point
from trainer.rounds.members import Member
from trainer.v1 import rounds_pb2


def status_of(coordinator: Coordinator) -> rounds_pb2.WatchUpdate:
    """The run now."""
    state = rounds_pb2.RUN_STATE_STOPPING if coordinator.stopping else rounds_pb2.RUN_STATE_RUNNING
    return rounds_pb2.WatchUpdate(
        run=coordinator.plan.run,
        state=rounds_pb2.RUN_STATE_FINISHED if coordinator.ended else state,
        rounds=coordinator.plan.rounds,
        parts=[_part(coordinator, index) for index in range(len(coordinator.plan.parts))],
        workers=[_worker(coordinator, member) for member in coordinator.members],
        received_bytes=coordinator.received_bytes,
        sent_bytes=coordinator.sent_bytes,
        problem=coordinator.problem or coordinator.feeder.problem,
        seconds=coordinator.clock() - coordinator.begun_s,
    )


def _part(coordinator: Coordinator, index: int) -> rounds_pb2.PartStatus:
    name, now = coordinator.plan.parts[index], coordinator.clock()
    first = min(coordinator.plan.cutting.parts[name], key=coordinator.ledger.round)
    round_, due = coordinator.ledger.round(first), coordinator.ledger.due_at(first)
    members = [member for member in coordinator.members if member.place.part == index]
    return rounds_pb2.PartStatus(
        part=index,
        name=name,
        round=round_,
        seconds_left=None if due is None else max(due - now, 0.0),
        replicas=coordinator.members.replicas,
        present=coordinator.members.present(index, now),
        arrived=sum(member.done(first) >= round_ for member in members),
        losses=_mean([dict(member.beat.losses) for member in members]),
        published=coordinator.publisher.published.get(name),
        closed=map(_closed, coordinator.ledger.curves.of(coordinator.plan.cutting.parts[name][-1])),
    )


def _worker(coordinator: Coordinator, member: Member) -> rounds_pb2.WorkerStatus:
    now, beat = coordinator.clock(), member.beat
    gone = not coordinator.members.is_here(member, now)
    first = min(coordinator.fragments(member), key=coordinator.ledger.round)
    return rounds_pb2.WorkerStatus(
        worker=member.worker,
        part=member.place.part,
        replica=member.place.replica,
        device=member.device,
        doing=beat.doing,
        round=beat.round,
        steps=beat.steps,
        silent_seconds=max(now - member.heard_s, 0.0) if member.lease else 0.0,
        gone=gone,
        late=not gone and member.is_late(first, coordinator.ledger.round(first)),
        accepted=member.accepted,
        refused=member.refused,
        losses=beat.losses,
        sent_bytes=beat.sent_bytes,
        received_bytes=beat.received_bytes,
        busy_seconds=beat.busy_seconds,
        lived_seconds=beat.lived_seconds,
        problem=member.problem,
    )


def _closed(point: Point) -> rounds_pb2.ClosedRounds:
    return rounds_pb2.ClosedRounds(
        first=point.first, last=point.last, updates=point.updates, late=point.late, losses=point.losses()
    )


def _mean(losses: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each loss, over those that have it."""
    names = {name for each in losses for name in each}
    return {name: _average([each[name] for each in losses if name in each]) for name in names}


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
