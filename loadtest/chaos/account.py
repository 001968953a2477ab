"""What became of every request, and how long faults kept bytes away."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from loadtest.chaos.answer import LATE, OK, Answer
from loadtest.chaos.cases import Case
from loadtest.load.accounting import percentile

AFTER_S = 1.0
"""A fault may still be felt for so long after it ended."""


class Fate(StrEnum):
    """What became of a request."""

    RIGHT = "right"
    WRONG = "wrong"
    """A byte differs from the text without faults: in the answer, or in what a call brought before it failed."""
    LOST = "lost"
    """No whole answer, within its patience and with all its calls."""
    TURNED_AWAY = "turned away"
    """Of a flood, each of its calls refused with a time to come back: that is what a deployment that is full does."""
    LATE = "late"
    """Of a flood, taken at least once, and no whole answer within its patience."""


@dataclass(frozen=True)
class Happened:
    """A fault that was. Times are seconds of the monotonic clock."""

    kind: str
    target: str
    begin_s: float
    end_s: float
    sound_s: float | None = None
    """When every host and link was usable again, and stayed so; None where that was not before the next fault."""

    def meets(self, answer: Answer, after_s: float = 0.0) -> bool:
        """Whether any of a request lies in its time, or so long after."""
        return answer.begin_s < self.end_s + after_s and self.begin_s < answer.end_s


@dataclass(frozen=True)
class RightTexts:
    """What the deployment wrote before anything happened to it, by case."""

    first: Sequence[bytes]
    second: Sequence[bytes] = ()
    """Of the release that swaps deploy, where there is one."""
    swaps: Sequence[Happened] = ()

    def of(self, answer: Answer) -> tuple[bytes, ...]:
        """What is right for a request: one text, or that of either release where it met a swap."""
        texts = (self.first, self.second) if any(swap.meets(answer) for swap in self.swaps) else (self.first,)
        return tuple(each[answer.case] for each in texts)


@dataclass(frozen=True)
class Tally:
    """Requests of one mode, or of all."""

    requests: int = 0
    right: int = 0
    wrong: int = 0
    lost: int = 0
    turned_away: int = 0
    late: int = 0
    replays: int = 0
    refused: int = 0
    """Calls that were told to come back, and when."""
    repeated: int = 0
    """Calls that failed in another way and were made again, or given up."""
    p50_s: float | None = None
    p95_s: float | None = None
    most_s: float | None = None


@dataclass(frozen=True)
class Stalls:
    """How long the requests that one kind of fault hit waited for their next byte."""

    kind: str
    faults: int
    waits_s: list[float] = field(default_factory=list)

    def percentile_s(self, percent: int) -> float | None:
        return percentile(sorted(self.waits_s), percent)


def fate_of(answer: Answer, texts: RightTexts) -> Fate:
    right = texts.of(answer)
    pieces = [bytes.fromhex(each.output) for each in answer.tries]
    if not all(any(text.startswith(piece) for text in right) for piece in pieces):
        return Fate.WRONG
    if answer.status == OK:
        return Fate.RIGHT if answer.text in right else Fate.WRONG
    if answer.first or answer.status != LATE:
        return Fate.LOST
    return Fate.TURNED_AWAY if all(each.refused for each in answer.tries) else Fate.LATE


def tally(answers: Iterable[Answer], texts: RightTexts) -> Tally:
    """Count requests."""
    chosen = list(answers)
    fates = Counter(fate_of(answer, texts) for answer in chosen)
    seconds = sorted(answer.end_s - answer.begin_s for answer in chosen if answer.status == OK)
    failed = [each for answer in chosen for each in answer.tries]
    refused = sum(each.refused for each in failed)
    return Tally(
        len(chosen),
        fates[Fate.RIGHT],
        fates[Fate.WRONG],
        fates[Fate.LOST],
        fates[Fate.TURNED_AWAY],
        fates[Fate.LATE],
        sum(answer.replays for answer in chosen),
        refused,
        len(failed) - refused,
        percentile(seconds, 50),
        percentile(seconds, 95),
        seconds[-1] if seconds else None,
    )


def tallies(answers: Sequence[Answer], cases: Sequence[Case], texts: RightTexts) -> dict[str, Tally]:
    """By mode, and `all`."""
    modes = list(dict.fromkeys(case.mode for case in cases))
    found = {mode: tally((a for a in answers if cases[a.case].mode == mode), texts) for mode in modes}
    return found | {"all": tally(answers, texts)}


def stalls(answers: Sequence[Answer], happened: Sequence[Happened]) -> list[Stalls]:
    """By kind of fault: the longest wait for a byte of each request that was under way and had to be done again."""
    found: dict[str, list[float]] = {}
    for fault in happened:
        waits_s = found.setdefault(fault.kind, [])
        for answer in answers:
            if answer.first and answer.begin_s < fault.begin_s < answer.end_s and (answer.replays or answer.tries):
                waits_s.append(stall_s(answer, fault))
    counts = Counter(fault.kind for fault in happened)
    return [Stalls(kind, counts[kind], waits_s) for kind, waits_s in found.items()]


def calm(answers: Iterable[Answer], happened: Sequence[Happened]) -> Stalls:
    """The longest wait for a byte in each request that met no fault: what faults are to be compared with."""
    chosen = [answer for answer in answers if answer.first and not (answer.replays or answer.tries)]
    unharmed = [answer for answer in chosen if not any(fault.meets(answer, AFTER_S) for fault in happened)]
    return Stalls("none", 0, [longest_wait(answer)[1] for answer in unharmed if answer.arrivals_s])


def longest_wait(answer: Answer) -> tuple[float, float]:
    """When the longest wait for a byte ended, and how long it was; only of an answer to which something came."""
    gaps = itertools.pairwise([answer.begin_s, *answer.arrivals_s])
    begin_s, end_s = max(gaps, key=lambda gap: gap[1] - gap[0])
    return end_s, end_s - begin_s


def stall_s(answer: Answer, fault: Happened) -> float:
    """The longest wait for a byte that a fault may have made longer, counted from the fault's begin at the earliest."""
    moments = [answer.begin_s, *answer.arrivals_s, answer.end_s]
    gaps = itertools.pairwise(moments)
    return max(
        (
            end_s - max(begin_s, fault.begin_s)
            for begin_s, end_s in gaps
            if end_s > fault.begin_s and begin_s < fault.end_s + AFTER_S
        ),
        default=0.0,
    )


def wrong_words(answers: Iterable[Answer], cases: Sequence[Case], texts: RightTexts) -> list[str]:
    """A sentence for each request that was lost or wrong."""
    words = []
    for answer in answers:
        case, fate = cases[answer.case], fate_of(answer, texts)
        if fate is Fate.WRONG:
            pieces = [*(bytes.fromhex(each.output) for each in answer.tries), answer.text]
            words.append(f"{case.mode}, seed {case.seed}: wrong text {pieces!r}, right is {texts.of(answer)!r}")
        elif fate is Fate.LOST:
            last = answer.tries[-1].message if answer.tries else "it said nothing"
            seconds = answer.end_s - answer.begin_s
            words.append(f"{case.mode}, seed {case.seed}: lost after {seconds:.1f} s, {answer.status}: {last}")
    return words


def reasons(answers: Iterable[Answer]) -> Counter[str]:
    """Why calls were made again, without what differs from one to the next."""
    return Counter(
        f"{each.code}: {each.message[:120]}" for answer in answers for each in answer.tries if not each.refused
    )
