"""A run on a terminal: parts, workers, and who is late."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rounds.spark import spark
from trainer.v1 import rounds_pb2

DOING = {
    rounds_pb2.DOING_WAITING: "waits",
    rounds_pb2.DOING_FETCHING: "fetches",
    rounds_pb2.DOING_TRAINING: "trains",
    rounds_pb2.DOING_SENDING: "sends",
}
STATES = {
    rounds_pb2.RUN_STATE_RUNNING: "running",
    rounds_pb2.RUN_STATE_FINISHED: "finished",
    rounds_pb2.RUN_STATE_STOPPING: "stopping",
}
PART_HEAD = ("part", "round", "left", "here", "in", "published", "losses in nats")
WORKER_HEAD = ("worker", "part", "device", "does", "round", "step", "busy", "up", "down", "silent", "taken", "")
CURVE_WIDTH = 12
RATE_S = 30.0
"""Bytes come in bursts, one a round: a rate over less would jump."""
MAX_TEXT = 200


def lines_of(update: rounds_pb2.WatchUpdate, before: rounds_pb2.WatchUpdate | None = None) -> list[str]:
    """The run as a table for each of parts and workers.

    :param before: an earlier update, from which rates are reckoned; without it, from the coordinator's begin.
    """
    parts = {part.part: part for part in update.parts}
    return [
        *_head(update, before),
        "",
        *_table(PART_HEAD, [_part(part, update.rounds) for part in update.parts]),
        "",
        *_table(WORKER_HEAD, [_worker(worker, parts.get(worker.part)) for worker in update.workers]),
    ]


def _head(update: rounds_pb2.WatchUpdate, before: rounds_pb2.WatchUpdate | None) -> list[str]:
    before = before or rounds_pb2.WatchUpdate()
    seconds = max(update.seconds - before.seconds, 1e-9)
    moved = [
        f"{what} {size(now)} ({size((now - then) / seconds)}/s)"
        for what, now, then in (
            ("updates in", update.received_bytes, before.received_bytes),
            ("weights out", update.sent_bytes, before.sent_bytes),
        )
    ]
    late, gone = sum(w.late for w in update.workers), sum(w.gone for w in update.workers)
    here = f"{len(update.workers) - gone} of {sum(part.replicas for part in update.parts)} workers here"
    counts = [f"{count} {what}" for what, count in (("late", late), ("gone", gone)) if count]
    lines = [
        f"run {_plain(update.run[:12])}  {STATES.get(update.state, 'unknown')}  {update.rounds} rounds",
        "  ".join([", ".join([here, *counts]), *moved, f"in {duration(update.seconds)}"]),
    ]
    return [*lines, f"problem: {_plain(update.problem)}"] if update.problem else lines


def _part(part: rounds_pb2.PartStatus, rounds: int) -> tuple[str, ...]:
    return (
        _plain(part.name),
        f"{part.round}/{rounds}",
        duration(part.seconds_left) if part.HasField("seconds_left") else "-",
        f"{part.present}/{part.replicas}",
        str(part.arrived),
        str(part.published) if part.HasField("published") else "-",
        "  ".join(_loss(part, name) for name in sorted({*part.losses, *(n for c in part.closed for n in c.losses)})),
    )


def _loss(part: rounds_pb2.PartStatus, name: str) -> str:
    """The newest value, after the curve of the closed rounds."""
    curve = [closed.losses[name] for closed in part.closed if name in closed.losses]
    newest = part.losses[name] if name in part.losses else curve[-1]
    return " ".join(filter(None, (_plain(name.removesuffix("_nats")), spark(curve, CURVE_WIDTH), f"{newest:.3f}")))


def _worker(worker: rounds_pb2.WorkerStatus, part: rounds_pb2.PartStatus | None) -> tuple[str, ...]:
    name, open_round = (part.name, part.round) if part else (str(worker.part), 0)
    notes = [f"late: round {open_round} is open"] if worker.late else []
    if worker.problem:
        notes.append(f"refused: {_plain(worker.problem)}")
    return (
        _plain(worker.worker),
        f"{_plain(name)}.{worker.replica}",
        _plain(worker.device) or "-",
        "gone" if worker.gone else DOING.get(worker.doing, "joins"),
        str(worker.round),
        str(worker.steps),
        f"{worker.busy_seconds / worker.lived_seconds:.0%}" if worker.lived_seconds else "-",
        size(worker.sent_bytes),
        size(worker.received_bytes),
        duration(worker.silent_seconds),
        f"{worker.accepted}" + (f" ({worker.refused} refused)" if worker.refused else ""),
        "; ".join(notes),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _plain(text: str) -> str:
    """Nothing that a terminal would take for a command."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_TEXT])


def size(count: float) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """Time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
