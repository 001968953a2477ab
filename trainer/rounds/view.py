"""A run on a terminal: parts, workers, and who is late."""

import os
import shutil
from collections.abc import Sequence

from stages.errors import printable
from stages.progress import aligned, counted
from trainer.v1 import rounds_pb2

DOING = {
    rounds_pb2.DOING_WAITING: "waits",
    rounds_pb2.DOING_FETCHING: "fetches",
    rounds_pb2.DOING_TRAINING: "trains",
    rounds_pb2.DOING_SENDING: "sends",
}
PART_HEAD = ("part", "round", "left", "here", "in", "published", "losses in nats")
WORKER_HEAD = ("worker", "part", "device", "does", "round", "step", "busy", "up", "down", "silent", "taken", "")


def lines_of(update: rounds_pb2.WatchUpdate) -> list[str]:
    """The run as a table for each of parts and workers."""
    parts = {part.part: part for part in update.parts}
    return [
        *_head(update),
        "",
        *aligned([PART_HEAD, *(_part(part, update.rounds) for part in update.parts)]),
        "",
        *aligned([WORKER_HEAD, *(_worker(worker, parts.get(worker.part)) for worker in update.workers)]),
    ]


def _head(update: rounds_pb2.WatchUpdate) -> list[str]:
    seconds = max(update.seconds, 1e-9)  # since the coordinator began
    moved = [
        f"{what} {size(count)} ({size(count / seconds)}/s)"
        for what, count in (("updates in", update.received_bytes), ("weights out", update.sent_bytes))
    ]
    state = rounds_pb2.RunState.Name(update.state).removeprefix("RUN_STATE_").lower()
    late, gone = sum(w.late for w in update.workers), sum(w.gone for w in update.workers)
    here = f"{len(update.workers) - gone} of {sum(part.replicas for part in update.parts)} workers here"
    counts = [f"{count} {what}" for what, count in (("late", late), ("gone", gone)) if count]
    lines = [
        f"run {printable(update.run[:12])}  {state}  {counted(update.rounds, 'round')}",
        "  ".join([", ".join([here, *counts]), *moved, f"in {duration(update.seconds)}"]),
    ]
    return [*lines, f"problem: {printable(update.problem)}"] if update.problem else lines


def _part(part: rounds_pb2.PartStatus, rounds: int) -> tuple[str, ...]:
    return (
        printable(part.name),
        f"{part.round}/{rounds}",
        duration(part.seconds_left) if part.HasField("seconds_left") else "-",
        f"{part.present}/{part.replicas}",
        str(part.arrived),
        str(part.published) if part.HasField("published") else "-",
        "  ".join(f"{printable(name.removesuffix('_nats'))} {nats:.3f}" for name, nats in sorted(part.losses.items())),
    )


def _worker(worker: rounds_pb2.WorkerStatus, part: rounds_pb2.PartStatus | None) -> tuple[str, ...]:
    name, open_round = (part.name, part.round) if part else (str(worker.part), 0)
    notes = [f"late: round {open_round} is open"] if worker.late else []
    if worker.problem:
        notes.append(printable(worker.problem))
    return (
        printable(worker.worker),
        f"{printable(name)}.{worker.replica}",
        printable(worker.device) or "-",
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


HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def show(lines: Sequence[str], in_place: bool) -> None:
    """Print one page of text; :param in_place: whether over the last one, on a terminal."""
    text = framed(lines, shutil.get_terminal_size()) if in_place else "\n".join(lines) + "\n\n"
    print(text, end="", flush=True)


def framed(lines: Sequence[str], size: os.terminal_size) -> str:
    """The lines that fit, from the top, with the rests of older lines wiped: nothing flickers, nothing scrolls."""
    room = max(size.lines - 1, 1)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines"]
    return HOME + "".join(f"{line[: size.columns]}{END_OF_LINE}\n" for line in lines) + END_OF_SCREEN
