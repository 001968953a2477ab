"""Faults under load: one framework for a deployment that serves and for a training.

A target has a testbed and a table of `Fault`s that can be done to it. `select` keeps those that its network and its
weights allow, `make_schedule` draws when each comes from a seed, and `inflict` does one.
"""

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from loadtest.commands import BenchReport, check_names
from loadtest.faults.settings import FaultSettings
from loadtest.report.table import aligned
from loadtest.workload.testbed import LOOPBACK
from stages.errors import InputError

T = TypeVar("T")
End = Callable[[], object]  # of a fault
POLL_S = 0.1
QUIET = 0.2  # share of a turn within which its fault begins

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fault(Generic[T]):
    """A kind of fault, done to a testbed of type T: it begins, lasts, and ends."""

    name: str
    length_s: tuple[float, float]  # shortest and longest
    begin: Callable[[T, str], End]
    targets: Callable[[T], Sequence[str]]  # names of what it can be done to
    weight: int = 1  # how often it comes, beside the others
    absent: Callable[[FaultSettings], str] = lambda settings: ""  # why it cannot be done; empty when it can


def no_link(settings: FaultSettings) -> str:
    """Why a link cannot be cut."""
    return "" if settings.profile != LOOPBACK else "loopback has no link to cut: --profile names one that has"


@dataclass(frozen=True)
class FaultRecord:
    """A fault that was done. Times are seconds of the monotonic clock."""

    kind: str
    target: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class FaultRun:
    """The parts of a run's result that all targets share. Times are seconds of the monotonic clock."""

    faults: Sequence[FaultRecord]
    left_out: tuple[str, ...]  # what this run cannot have, and why
    ended: dict[str, str]  # processes that had ended without a fault's doing, and their last words
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def remarks(self) -> list[str]:
        """A sentence for whatever was left out, and for each process that had ended."""
        left_out = [f"left out: {reason}" for reason in self.left_out]
        return left_out + [f"{name} had ended: {last}" for name, last in self.ended.items()]

    def times_of(self, fault: FaultRecord) -> dict[str, Any]:
        """A fault with its times since the run began."""
        return {**vars(fault), "begin_s": fault.begin_s - self.begin_s, "end_s": fault.end_s - self.begin_s}


@dataclass(frozen=True)
class Selection(Generic[T]):
    """The kinds of faults that a run asks for."""

    able: tuple[Fault[T], ...]
    left_out: list[str]  # kinds that cannot be done here, and why
    count: int  # faults of the whole run


def select(faults: Mapping[str, Fault[T]], settings: FaultSettings, each_minute: float) -> Selection[T]:
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
    faults: Sequence[Fault[T]], testbed: T, seconds: float, count: int, seed: int, length_scale: float = 1.0
) -> list[Planned]:
    """`count` faults, one in each equal turn of the time, drawn beforehand from a seed.

    Kinds come by their weights, and every kind at least once where `count` allows; the targets of a kind take turns
    in a shuffled order.
    """
    chance = random.Random(seed)
    drawn = [fault.name for fault in faults][:count]
    while len(drawn) < count:
        # the kind that is furthest behind its weight
        drawn.append(min(faults, key=lambda fault: (drawn.count(fault.name) / fault.weight, fault.name)).name)
    chance.shuffle(drawn)
    by_name = {fault.name: fault for fault in faults}
    targets = {fault.name: list(fault.targets(testbed)) for fault in faults}
    orders = {name: chance.sample(each, len(each)) for name, each in targets.items()}
    turn_s = seconds / max(count, 1)
    plan = []
    for i, name in enumerate(drawn):
        orders[name].append(target := orders[name].pop(0))
        length_s = round(length_scale * chance.uniform(*by_name[name].length_s), 2)
        # early in its turn, so that there is time to recover before the next one
        plan.append(Planned(round((i + chance.uniform(0, QUIET)) * turn_s, 2), name, target, length_s))
    return plan


def inflict(
    fault: Fault[T],
    testbed: T,
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


# The report of any target


def fault_report(
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]],
    verdict: Sequence[str],
    record: dict[str, Any],
    trouble: int,
) -> BenchReport:
    """:param tables: head and rows by title. :param verdict: a sentence a line, below the tables that have rows.

    :param trouble: things that no run may have.
    """
    parts = [f"{title}:\n{aligned(head, rows)}" for title, (head, rows) in tables.items() if rows]
    parts.append("\n".join(f"- {words}" for words in verdict))
    return BenchReport("\n" + "\n\n".join(parts), record, holds=not trouble)


# Processes that faults are done to


LAST_LINES = 3


class Program:
    """A command that runs as one process at a time: started, ended in one way or another, and started again."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.command, self.log = name, command, log
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def ended(self) -> int | None:
        """The exit code of the last process, below 0 for a signal; None while it runs, or was never started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, unless it runs. In a lab it ends with the thread that calls this."""
        if self.pid is not None:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.starts += 1

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)  # does nothing to one that has ended

    def kill(self) -> None:
        """End it at once, as a power cut would; it has ended when this returns."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " ".join(lines[-LAST_LINES:]) or "its log is empty"
