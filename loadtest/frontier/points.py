"""Rows of the table and points of the picture."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from onesweep.loadtest.frontier.worth import Ranking, Worth
from onesweep.loadtest.latency.interleave import Sample, ended_well
from onesweep.loadtest.report.table import percentile
from onesweep.serving.modes.frontier import Frontier, Option
from onesweep.stages.errors import OnesweepError

KEPT = 1.1  # a budget is kept up to this share of it
_REST = re.compile(r"; after (\d+) of (\d+) \w+ \d+ ms were left, so (\S+) wrote the rest")


@dataclass(frozen=True)
class Point:
    """An arm on a profile. None where no request ended well."""

    profile: str
    spec: str
    mode: str
    scorer: str | None
    bits: float
    bits_low: float | None
    bits_high: float | None
    requests: int
    failures: int
    error: str | None
    seconds: float | None = None  # median at the client
    seconds_p95: float | None = None
    sweeps: float | None = None  # mean; likewise those below
    host_seconds: float | None = None
    router_seconds: float | None = None
    wire_bytes: float | None = None
    # Bits a byte of held-out text under the model whose distribution this text has; None where none is defined.
    exact_bits: float | None = None
    pareto: bool = False  # nothing quicker has text as good


@dataclass(frozen=True)
class AutoPoint:
    """`auto` with a budget on a profile. None where no request ended well."""

    profile: str
    budget_ms: int
    requests: int
    failures: int
    error: str | None
    picked: dict[str, int]  # how often each setting began a text
    hurried: int = 0  # texts that another setting had to finish
    seconds: float | None = None
    worst: float | None = None  # largest latency over budget
    kept: bool | None = None
    bits: float | None = None  # of the settings that wrote, each by its share of the symbols
    best_fixed: str | None = None  # the setting of best text whose 95th percentile fits the budget, and its bits
    best_fixed_bits: float | None = None

    @property
    def as_good(self) -> bool | None:
        """True where no fixed setting that fits has better text; None where there is nothing to compare."""
        if self.bits is None:
            return None
        return self.best_fixed_bits is None or self.bits <= self.best_fixed_bits + 1e-9


def point_of(profile: str, worth: Worth, answers: Sequence[Sample], exact_bits: float | None = None) -> Point:
    good, failed = ended_well(answers)
    arm = worth.arm
    plain = Point(
        *(profile, arm.label, arm.mode, arm.scorer, worth.bits, worth.low, worth.high),
        *(len(answers), len(answers) - len(good), failed),
        exact_bits=exact_bits,
    )
    if not good:
        return plain
    latencies = sorted(answer.latency_ms / 1000 for answer in good)
    return replace(
        plain,
        seconds=statistics.median(latencies),
        seconds_p95=percentile(latencies, 95),
        sweeps=statistics.fmean(answer.booked["sweeps"] for answer in good),
        host_seconds=statistics.fmean(answer.host_ms for answer in good) / 1000,
        router_seconds=statistics.fmean(answer.router_ms for answer in good) / 1000,
        wire_bytes=statistics.fmean(answer.booked["wire_bytes_total"] for answer in good),
    )


def with_pareto(points: Sequence[Point]) -> list[Point]:
    """The points of one profile, with those marked that no other beats in seconds and bits both."""

    def beaten(point: Point) -> bool:
        assert point.seconds is not None
        return any(
            o.seconds is not None
            and o.seconds <= point.seconds
            and o.bits <= point.bits
            and (o.seconds, o.bits) != (point.seconds, point.bits)
            for o in points
        )

    return [replace(p, pareto=p.seconds is not None and not beaten(p)) for p in points]


def usual_budgets_ms(points: Sequence[Point]) -> tuple[int, ...]:
    """Budgets between neighbouring points of a profile's frontier, and one beyond the last."""
    seconds = sorted(p.seconds for p in points if p.pareto and p.seconds is not None)
    between = [(a * b) ** 0.5 for a, b in pairwise(seconds)]
    beyond = [seconds[-1] * 1.3] if seconds else []
    return tuple(dict.fromkeys(round(value * 1000) for value in [*between, *beyond]))


def auto_point_of(profile: str, budget_ms: int, answers: Sequence[Sample], points: Sequence[Point]) -> AutoPoint:
    """:param points: of the fixed settings on the same profile."""
    good, failed = ended_well(answers)
    bits = {point.spec: point.bits for point in points}
    parts = [parts_of(answer.booked["reason"], answer.booked["output_tokens"]) for answer in good]
    fitting = [p for p in points if p.seconds_p95 is not None and p.seconds_p95 * 1000 <= budget_ms]
    best = min(fitting, key=lambda p: p.bits, default=None)
    plain = AutoPoint(
        profile,
        budget_ms,
        len(answers),
        len(answers) - len(good),
        failed,
        dict(Counter(next(iter(part)) for part in parts)),
        best_fixed=best.spec if best else None,
        best_fixed_bits=best.bits if best else None,
    )
    if not good:
        return plain
    worst = max(answer.latency_ms for answer in good) / budget_ms
    written = [(bits[label], count) for part in parts for label, count in part.items() if label in bits]
    return replace(
        plain,
        hurried=sum(len(part) > 1 for part in parts),
        seconds=statistics.median(answer.latency_ms for answer in good) / 1000,
        worst=worst,
        kept=worst <= KEPT,
        bits=sum(b * count for b, count in written) / max(1, sum(count for _, count in written)),
    )


def parts_of(reason: str, count: int) -> dict[str, int]:
    """The settings that wrote a text of `count` symbols with those of each, read from the router's reason."""
    label, parts, begun = reason.partition(" ")[0], dict[str, int](), 0
    for written, _, other in _REST.findall(reason):
        parts[label] = parts.get(label, 0) + int(written) - begun
        label, begun = other, int(written)
    parts[label] = parts.get(label, 0) + count - begun
    return parts


# What each arm costs wherever it runs, sweeps and arithmetic: with its worth, an option of the file for `auto`.


def option_of(worth: Worth, answers: Sequence[Sample]) -> Option:
    """:param answers: at least one, none of them failed."""
    settings = {name: value for name, value in worth.arm.request().items() if name != "mode"}
    sweeps = [answer.booked["sweeps"] for answer in answers]
    return Option(
        mode=worth.arm.mode,
        settings=tuple(settings.items()),
        bits=worth.bits,
        output_symbols=max(round(statistics.fmean(answer.booked["output_tokens"] for answer in answers)), 1),
        sweeps=statistics.fmean(sweeps),
        sweeps_high=percentile(sorted(sweeps), 95) or 0.0,
        host_ms=statistics.median(answer.host_ms for answer in answers),
        router_ms=statistics.median(answer.router_ms for answer in answers),
        wire_bytes=statistics.fmean(answer.booked["wire_bytes_total"] for answer in answers),
        bits_low=worth.low,
        bits_high=worth.high,
    )


def frontier_of(ranking: Ranking, options: Sequence[Option]) -> Frontier:
    return Frontier(tuple(options), ranking.weights, ranking.judge, ranking.basis, ranking.human_bits)


def write_frontier(path: Path, frontier: Frontier, origin: dict[str, Any]) -> None:
    """:param origin: how it was measured. Raises OnesweepError."""
    try:
        path.write_text(json.dumps(frontier.to_record() | origin, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OnesweepError(f"cannot write {path}: {error.strerror}") from None
