"""A plan for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.planning.plan import Row
from trainer.rounds.view import size

HEAD = ("way", "rounds", "up", "down", "all", "hours", "used", "weights", "gradients", "optimizer", "copies", "rounds'")
TAIL = ("encoding", "activations", "worker", "coordinator")


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: bytes of a worker and of all, hours, share used, and memory."""
    header = [*HEAD, *TAIL]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return [*lines, *(f"| {' | '.join(_cells(row))} |" for row in rows)]


def _cells(row: Row) -> list[str]:
    m, rounds = row.memory, row.config.rounds
    held = (m.weights, m.gradients, m.optimizer, m.copies, m.rounds, m.encoding)
    return [
        row.name,
        f"{rounds.rounds} x {rounds.steps_per_round}",
        *map(size, (row.up_bytes, row.down_bytes, row.all_bytes)),
        f"{row.timing.seconds / 3600:.3g}",
        f"{row.timing.used:.1%}",
        *map(size, held),
        "-" if m.activations is None else size(m.activations),
        size(m.total),
        size(row.coordinator_bytes),
    ]
