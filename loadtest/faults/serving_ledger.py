"""The ledger of a deployment under faults: each request has one fate, and each fault kept bytes away for a while."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.faults.base import FaultRecord
from loadtest.faults.clients import OK, Answer, SeededRequest
from loadtest.report.table import percentile

AFTERMATH_S = 1.0  # a fault may still be felt for so long after it ended


class Fate(StrEnum):
    """The class that a request falls into."""

    RIGHT = "right"
    # A byte differs from the answer without faults: in the last call, or in what one brought before it failed.
    WRONG = "wrong"
    LOST = "lost"  # no whole answer, within its patience and with all its calls


@dataclass(frozen=True)
class RequestCounts:
    """Requests of one mode, or of all."""

    requests: int = 0
    # by their fate
    right: int = 0
    wrong: int = 0
    lost: int = 0
    replays: int = 0
    refused: int = 0  # calls whose refusal named a time to come back
    repeated: int = 0  # calls that failed in another way and were made again, or given up
    p50_s: float | None = None
    p95_s: float | None = None
    most_s: float | None = None


def fate_of(answer: Answer, texts: Sequence[bytes]) -> Fate:
    """:param texts: that the deployment wrote, or the pixels that it drew, before any fault, by case."""
    right = texts[answer.case]
    if not all(right.startswith(each.output) for each in answer.tries):
        return Fate.WRONG
    if answer.status != OK:
        return Fate.LOST
    return Fate.RIGHT if answer.output == right else Fate.WRONG


def count_requests(answers: Iterable[Answer], texts: Sequence[bytes]) -> RequestCounts:
    chosen = list(answers)
    fates = Counter(fate_of(answer, texts) for answer in chosen)
    seconds = sorted(answer.end_s - answer.begin_s for answer in chosen if answer.status == OK)
    failed = [each for answer in chosen for each in answer.tries]
    refused = sum(each.refused for each in failed)
    return RequestCounts(
        requests=len(chosen),
        **{fate.value: fates[fate] for fate in Fate},
        replays=sum(answer.replays for answer in chosen),
        refused=refused,
        repeated=len(failed) - refused,
        p50_s=percentile(seconds, 50),
        p95_s=percentile(seconds, 95),
        most_s=seconds[-1] if seconds else None,
    )


def counts_by_mode(
    answers: Sequence[Answer], cases: Sequence[SeededRequest], texts: Sequence[bytes]
) -> dict[str, RequestCounts]:
    """By mode, and `all`."""
    modes = list(dict.fromkeys(case.mode for case in cases))
    found = {mode: count_requests((a for a in answers if cases[a.case].mode == mode), texts) for mode in modes}
    return found | {"all": count_requests(answers, texts)}


def stalls(answers: Sequence[Answer], faults: Sequence[FaultRecord]) -> dict[str, list[float]]:
    """By kind of fault: the longest wait for a byte of each request that was under way and had to be done again, from
    short to long."""
    # a killed host has about half of six requests: waits of the others would make any percentile look good
    found: dict[str, list[float]] = {}
    for fault in faults:
        waits_s = found.setdefault(fault.kind, [])
        for answer in answers:
            if answer.begin_s < fault.begin_s < answer.end_s and (answer.replays or answer.tries):
                waits_s.append(stall_s(answer, fault))
    return {kind: sorted(waits_s) for kind, waits_s in found.items()}


def stall_s(answer: Answer, fault: FaultRecord) -> float:
    """The longest wait for a byte that a fault may have made longer, counted from the fault's begin at the earliest."""
    gaps = itertools.pairwise([answer.begin_s, *answer.arrivals_s, answer.end_s])
    waits_s = [
        end_s - max(begin_s, fault.begin_s)
        for begin_s, end_s in gaps
        if end_s > fault.begin_s and begin_s < fault.end_s + AFTERMATH_S
    ]
    return max(waits_s, default=0.0)


def wrong_words(answers: Iterable[Answer], cases: Sequence[SeededRequest], texts: Sequence[bytes]) -> list[str]:
    """A sentence for each request that was lost or wrong."""
    words = []
    for answer in answers:
        case, fate = cases[answer.case], fate_of(answer, texts)
        if fate is Fate.WRONG:
            if case.draws:
                found = f"wrong pixels of {case.prompt}: {_difference(answer.output, texts[answer.case])}"
            else:
                written = [*(each.output for each in answer.tries), answer.output]
                found = f"wrong text {written!r}, right is {texts[answer.case]!r}"
            words.append(f"{case.mode}, seed {case.seed}: {found}")
        elif fate is Fate.LOST:
            last = answer.tries[-1].message if answer.tries else "it said nothing"
            seconds = answer.end_s - answer.begin_s
            words.append(f"{case.mode}, seed {case.seed}: lost after {seconds:.1f} s, {answer.status}: {last}")
    return words


def _difference(found: bytes, right: bytes) -> str:
    if len(found) != len(right):
        return f"{len(found)} bytes, where {len(right)} are right"
    return f"{sum(one != other for one, other in zip(found, right, strict=True))} of {len(right)} bytes differ"


def reasons(answers: Iterable[Answer]) -> Counter[str]:
    """Why calls were made again, without what differs from one to the next."""
    return Counter(
        f"{each.code}: {each.message[:120]}" for answer in answers for each in answer.tries if not each.refused
    )
