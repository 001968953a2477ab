"""What can be read from a run that is watched: how long its rounds take, and how busy its workers are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.training.journal import Entry
from loadtest.training.view import View, WorkerView


@dataclass(frozen=True)
class Busy:
    """One worker, between the first and the last time that it said something new of itself."""

    worker: str
    share: float
    """Of the time, spent in training steps."""
    step_s: float


def round_seconds(entries: Sequence[Entry]) -> float | None:
    """Mean time from one merge to the next, of the part that takes longest; None where none has two.

    What comes before the first one, the start of processes among it, is left out.
    """
    times: dict[str, list[float]] = {}
    for entry in entries:
        if entry.kind == "closed":
            times.setdefault(entry.part, []).append(entry.at_s)
    return max(((at[-1] - at[0]) / (len(at) - 1) for at in times.values() if len(at) > 1), default=None)


def busy_shares(views: Sequence[View], steps_per_round: int) -> list[Busy]:
    """Of every worker that said something new twice, after its first round."""
    names = sorted({worker.name for view in views for worker in view.workers})
    found = [_busy(name, _news(views, name), steps_per_round) for name in names]
    return [busy for busy in found if busy is not None]


def step_seconds(shares: Sequence[Busy]) -> float:
    return statistics.mean(busy.step_s for busy in shares)


def _news(views: Sequence[View], name: str) -> list[tuple[float, WorkerView]]:
    """Looks at which a worker's own figures had changed: it tells them now and then only."""
    found: list[tuple[float, WorkerView]] = []
    for view in views:
        worker = view.worker(name)
        if worker is None or worker.round < 1:
            continue
        if not found or worker.busy_s > found[-1][1].busy_s:
            found.append((view.at_s, worker))
    return found[1:]  # the first may be old


def _busy(name: str, news: list[tuple[float, WorkerView]], steps_per_round: int) -> Busy | None:
    if len(news) < 2:
        return None
    (begin_s, first), (end_s, last) = news[0], news[-1]
    steps = (last.round - first.round) * steps_per_round + last.steps - first.steps
    busy_s = last.busy_s - first.busy_s
    return Busy(name, busy_s / (end_s - begin_s), busy_s / steps) if steps > 0 else None
