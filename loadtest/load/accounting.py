"""The account of a run: every request in exactly one class, and what the classes add up to."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onesweep.loadtest.load.plan import LoadSample, Outcome, Window, outcome_of
from onesweep.loadtest.report.table import percentile

MESSAGES = 5  # different failures that are shown


@dataclass(frozen=True)
class Judged:
    """A request and its class. Times are seconds since the window began."""

    sample: LoadSample
    outcome: Outcome
    begin_s: float
    end_s: float

    @property
    def latency_ms(self) -> float:
        return self.sample.latency_ms


@dataclass(frozen=True)
class Counts:
    """Requests in each class; `requests` is their sum."""

    requests: int = 0
    right: int = 0
    refused: int = 0
    failed: int = 0
    lost: int = 0
    wrong: int = 0
    cut: int = 0

    @property
    def trouble(self) -> int:
        """Requests that a sound deployment does not have."""
        return self.failed + self.lost + self.wrong


@dataclass(frozen=True)
class LoadFigures:
    """Figures of a run. Percentiles are those of right answers; None where there were none."""

    counts: Counts  # requests that began in the window
    # Those that began before it, while users came and the deployment warmed up, or from locust's page after it.
    outside: Counts
    seconds: float  # length of the window as it came out
    throughput_rps: float  # right answers that arrived in the window, a second
    output_bytes_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    refusal_p50_ms: float | None  # from sending a request to its refusal
    refusal_p95_ms: float | None
    retry_after_ms: float | None  # median of when refusals said to come back
    generator_cores: float  # processor time of the load generator, a second
    failures: dict[str, int]  # the most frequent statuses with their sentences, and how often
    interrupted: bool = False


def judge(samples: Iterable[LoadSample], window: Window, texts: dict[int, bytes]) -> list[Judged]:
    """:param texts: what each answered case gives alone."""
    return [
        Judged(s, outcome_of(s, texts.get(s.case)), s.begin_s - window.begin_s, s.end_s - window.begin_s)
        for s in samples
    ]


def count(judged: Iterable[Judged]) -> Counts:
    found = Counter(j.outcome for j in judged)
    return Counts(requests=found.total(), **{outcome.value: found[outcome] for outcome in Outcome})


def figures_of(judged: Sequence[Judged], window: Window, max_bytes: int) -> LoadFigures:
    """:param judged: every request of the run, whenever it began."""
    inside = [j for j in judged if window.holds(j.sample)]
    right = sorted(j.latency_ms for j in inside if j.outcome is Outcome.RIGHT)
    refused = [j for j in inside if j.outcome is Outcome.REFUSED]
    refusals = sorted(j.latency_ms for j in refused)
    arrived = sum(j.outcome is Outcome.RIGHT and 0 <= j.end_s < window.seconds for j in judged)
    rate = arrived / window.seconds if window.seconds > 0 else 0.0
    failed = [j.sample for j in inside if j.outcome is Outcome.FAILED]
    failures = Counter(": ".join(filter(None, (each.status, each.message))) for each in failed)
    return LoadFigures(
        counts=count(inside),
        outside=count(j for j in judged if not window.holds(j.sample)),
        seconds=window.seconds,
        throughput_rps=rate,
        output_bytes_per_s=rate * max_bytes,
        p50_ms=percentile(right, 50),
        p95_ms=percentile(right, 95),
        p99_ms=percentile(right, 99),
        refusal_p50_ms=percentile(refusals, 50),
        refusal_p95_ms=percentile(refusals, 95),
        retry_after_ms=statistics.median(j.sample.retry_after_ms or 0 for j in refused) if refused else None,
        generator_cores=window.processor_s / window.seconds if window.seconds > 0 else 0.0,
        failures=dict(failures.most_common(MESSAGES)),
        interrupted=window.interrupted,
    )
