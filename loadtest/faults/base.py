"""Faults under load: which can be done, when each comes, and one of them done."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtest.commands import check_names
from loadtest.faults.settings import ChaosSettings
from loadtest.workload.testbed import LOOPBACK
from stages.errors import InputError

if TYPE_CHECKING:
    from loadtest.faults.serving_testbed import ServingTestbed

End = Callable[[], object]  # of a fault
POLL_S = 0.1
QUIET = 0.2  # share of a turn within which its fault begins

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault, done to a testbed: it begins, lasts, and ends."""

    name: str
    length_s: tuple[float, float]  # shortest and longest
    begin: Callable[[ServingTestbed, str], End]
    targets: Callable[[ServingTestbed], Sequence[str]]  # names of what it can be done to
    absent: Callable[[ChaosSettings], str] = lambda settings: ""  # why it cannot be done; empty when it can


def no_link(settings: ChaosSettings) -> str:
    """Why a link cannot be cut."""
    return "" if settings.profile != LOOPBACK else "loopback has no link to cut: --profile names one that has"


@dataclass(frozen=True)
class FaultRecord:
    """A fault that was done. Times are seconds of the monotonic clock."""

    kind: str
    target: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Selection:
    """The kinds of faults that a run asks for."""

    able: tuple[Fault, ...]
    left_out: list[str]  # kinds that cannot be done here, and why
    count: int  # faults of the whole run


def select(faults: Mapping[str, Fault], settings: ChaosSettings, each_minute: float) -> Selection:
    """:param each_minute: faults, where `settings` has no count. Raises InputError."""
    names = tuple(faults) if settings.faults is None else settings.faults
    check_names("--faults", names, tuple(faults))
    absent = {name: why for name in names if (why := faults[name].absent(settings))}
    able = tuple(faults[name] for name in names if name not in absent)
    if names and not able:
        raise InputError("; ".join(absent.values()))
    if settings.count is not None and settings.count < len(able):
        raise InputError(f"--count {settings.count} is less than the {len(able)} kinds of --faults")
    usual = max(len(able), round(settings.minutes * each_minute)) if able else 0
    left_out = [f"fault {name}: {why}" for name, why in absent.items()]
    return Selection(able, left_out, usual if settings.count is None else settings.count)


@dataclass(frozen=True)
class Planned:
    """One fault that is to come."""

    at_s: float  # since the run began
    kind: str
    target: str
    length_s: float


def make_schedule(
    faults: Sequence[Fault], testbed: ServingTestbed, seconds: float, count: int, seed: int, length_scale: float = 1.0
) -> list[Planned]:
    """`count` faults, one in each equal turn of the time, drawn beforehand from a seed; kinds come equally often."""
    chance = random.Random(seed)
    drawn, turn_s = [faults[i % len(faults)] for i in range(count)], seconds / max(count, 1)
    chance.shuffle(drawn)
    plan = []
    for i, fault in enumerate(drawn):
        length_s = round(length_scale * chance.uniform(*fault.length_s), 2)
        # early in its turn, so that there is time to recover before the next one
        at_s = round((i + chance.uniform(0, QUIET)) * turn_s, 2)
        plan.append(Planned(at_s, fault.name, chance.choice(fault.targets(testbed)), length_s))
    return plan


def inflict(
    fault: Fault,
    testbed: ServingTestbed,
    target: str,
    length_s: float,
    tick: Callable[[], Any],
) -> FaultRecord:
    """Do a fault, from its begin to its end.

    Faults come one at a time: with two hosts for each block, two at once may leave no way through, and then a request
    that fails is right to fail. No run could ask for zero losses.

    :param tick: waits a moment, and looks after the run meanwhile.
    """
    begin_s = time.monotonic()
    end = fault.begin(testbed, target)
    try:
        while time.monotonic() < begin_s + length_s:
            tick()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            end()
    return FaultRecord(fault.name, target, begin_s, time.monotonic())
