"""A run on a terminal: parts, workers, and who is late."""

from __future__ import annotations

from collections.abc import Sequence

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


def lines_of(update: rounds_pb2.WatchUpdate) -> list[str]:
    """The run as a table for each of parts and workers."""
    state = STATES.get(update.state, "unknown")
    moved = f"{size(update.received_bytes)} of updates in, {size(update.sent_bytes)} of weights out"
    head = [f"run {update.run[:12]}  {state}  {update.rounds} rounds  {moved}"]
    if update.problem:
        head.append(f"problem: {update.problem}")
    parts = [_part(part, update.rounds) for part in update.parts]
    workers = [_worker(worker) for worker in update.workers]
    return [
        *head,
        "",
        *_table(("part", "round", "in", "workers", "left", "published", "losses"), parts),
        "",
        *_table(("worker", "part", "does", "round", "steps", "silent", "taken", "busy", "losses"), workers),
    ]


def _part(part: rounds_pb2.PartStatus, rounds: int) -> tuple[str, ...]:
    left = f"{part.seconds_left:.0f} s" if part.HasField("seconds_left") else "-"
    published = str(part.published) if part.HasField("published") else "-"
    return (
        _plain(part.name),
        f"{part.round}/{rounds}",
        str(part.arrived),
        f"{part.present}/{part.replicas}",
        left,
        published,
        _losses(part.losses),
    )


def _worker(worker: rounds_pb2.WorkerStatus) -> tuple[str, ...]:
    does = "gone" if worker.gone else DOING.get(worker.doing, "joins") + (", late" if worker.late else "")
    taken = f"{worker.accepted}" + (f" ({worker.refused} refused)" if worker.refused else "")
    return (
        _plain(worker.worker),
        f"{worker.part}.{worker.replica}",
        does,
        str(worker.round),
        str(worker.steps),
        f"{worker.silent_seconds:.0f} s",
        taken,
        f"{worker.busy_seconds:.0f} s",
        _losses(worker.losses),
    )


def _losses(losses: object) -> str:
    pairs = sorted(dict(losses).items())  # type: ignore[call-overload]
    return "  ".join(f"{_plain(name.removesuffix('_nats'))} {value:.3f}" for name, value in pairs)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _plain(text: str) -> str:
    """Nothing that a terminal would take for a command."""
    return "".join(character if character.isprintable() else "?" for character in text[:64])


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
