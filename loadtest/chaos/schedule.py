"""When which fault comes: drawn from a seed, every kind among them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUIET = 0.2
"""Share of a turn before its fault begins at the latest."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault as the schedule sees it."""

    name: str
    weight: int
    length_s: tuple[float, float]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    """One fault that is to come."""

    at_s: float
    """Since the run began."""
    kind: str
    target: str
    length_s: float


def make_schedule(kinds: Sequence[Kind], seconds: float, count: int, seed: int) -> list[Planned]:
    """`count` faults, one in each equal turn of the time. Kinds come by their weights, and every kind at least once
    where `count` allows; the targets of a kind take turns in a shuffled order."""
    chance = random.Random(seed)
    drawn = [kind.name for kind in kinds][:count]
    while len(drawn) < count:
        drawn.append(_most_due(kinds, drawn))
    chance.shuffle(drawn)
    by_name = {kind.name: kind for kind in kinds}
    orders = {kind.name: chance.sample(kind.targets, len(kind.targets)) for kind in kinds}
    turn_s = seconds / max(count, 1)
    plan = []
    for i, name in enumerate(drawn):
        kind, order = by_name[name], orders[name]
        order.append(target := order.pop(0))
        length_s = round(chance.uniform(*kind.length_s), 2)
        plan.append(Planned(round((i + chance.uniform(0, QUIET)) * turn_s, 2), name, target, length_s))
    return plan


def _most_due(kinds: Sequence[Kind], drawn: Sequence[str]) -> str:
    """The kind that is furthest behind its weight."""
    counts: Mapping[str, int] = {kind.name: drawn.count(kind.name) for kind in kinds}
    return min(kinds, key=lambda kind: (counts[kind.name] / kind.weight, kind.name)).name
