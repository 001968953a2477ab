"""`bench loadtest`: runs of users on a deployment, each for a while, then a check of every text."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

from loadtest.commands import BenchReport, echo, settings_record
from loadtest.lab.lab import Child
from loadtest.lab.profile import ROUTER
from loadtest.load.plan import OK, LoadPlan, LoadSample, LoadSettings, Outcome, Recording, Window, outcome_of
from loadtest.report.table import Column, number, number_column, percentile, table, text_column
from loadtest.workload.caller import RouterState
from loadtest.workload.prompts import seeded_prompts
from loadtest.workload.testbed import Testbed, open_testbed
from loadtest.workload.texts import Texts
from stages.errors import InputError, ServiceError
from stages.progress import counted


@dataclass(frozen=True)
class LoadResult:
    mode: str
    users: int
    metrics: LoadMetrics
    wrong: str = ""  # the first wrong text with the right one


def measure_load(settings: LoadSettings) -> BenchReport:
    """Raises OnesweepError."""
    s, results = settings, list[LoadResult]()
    if s.target.access is None:
        echo(f"starting {s.target.host_count} hosts and a router ({s.target.profile}) ...")
    with open_testbed(s.target) as target:
        facts = target.caller.facts()
        echo(f"{target.access.router} accepts {facts.request_limit} requests at once ...")
        cases = seeded_prompts(s.cases, s.first_seed, s.max_bytes, facts.context_length)
        texts, modes = Texts(target, cases, s.max_bytes), _served(s.modes, facts)
        for mode, users in product(modes, sorted(s.users)):
            echo(f"{mode}, users: {users}; {s.seconds:g} s after {s.warm_up_s:g} s of warm-up ...")
            results.append(run_load(s, texts, mode, users))
            trouble = results[-1].metrics.counts.trouble + results[-1].metrics.outside.trouble
            echo(f"{mode}, {_in_short(results[-1])}" + (f", {trouble} failed, lost or wrong" if trouble else ""))
    of_modes = [[result for result in results if result.mode == mode] for mode in modes] if len(s.users) > 1 else []
    knees = [find_knee(each) for each in of_modes]
    notes = [knee_note(*knee) for knee in knees] if len(results) > 1 else run_notes(results[0])
    rows = [run_record(result) for result in results]
    found = {"router": target.access.router, "hosts": facts.hosts, "request_limit": facts.request_limit, "rows": rows}
    found["knees"] = [{"mode": result.mode, "users": result.users} for result, _ in knees]
    record = found | {"settings": settings_record(s, target=target.network.profile)}
    counts = [count for result in results for count in (result.metrics.counts, result.metrics.outside)]
    failed, lost, wrong = (sum(getattr(count, name) for count in counts) for name in ("failed", "lost", "wrong"))
    if trouble := failed + lost + wrong:  # a sound deployment answers everything
        notes.append(f"of all requests, warm-up included, {failed} failed, {lost} were lost, {wrong} were wrong")
    return BenchReport("\n".join([table(RUNS, rows), *notes]), record, passed=not trouble)


def _served(modes: Sequence[str], facts: RouterState) -> list[str]:
    """The modes that the router serves, after a sentence about each other one. Raises InputError if none is left."""
    served = [mode for mode in modes if mode in facts.modes]
    if not served:
        raise InputError(f"this deployment cannot serve {', '.join(modes)}; it serves {', '.join(facts.modes)}")
    for mode in modes:
        if mode not in served:
            print(f"skipping {mode}: the router serves only {', '.join(facts.modes)}")
    return served


def run_load(settings: LoadSettings, texts: Texts, mode: str, users: int) -> LoadResult:
    """One run on an otherwise idle deployment, with every answer compared to the text of its case.

    Raises OnesweepError."""
    recording = recorded(texts.target, settings.plan(texts.target.access, texts.cases, mode, users))
    expected = _expected(recording, texts, mode)
    judged = judge(recording.samples, expected)
    wrong = next((_difference(sample, texts, expected) for sample, outcome in judged if outcome is Outcome.WRONG), "")
    return LoadResult(mode, users, metrics_of(judged, recording.window), wrong)


def _expected(recording: Recording, texts: Texts, mode: str) -> dict[int, bytes]:
    """The expected texts. If the deployment no longer gives any, raises ServiceError with the known results."""
    try:
        return texts.of(mode, (sample.case for sample in recording.samples if sample.status == OK))
    except ServiceError as error:
        statuses = Counter(sample.status for sample in recording.samples).most_common()
        known = ", ".join(f"{count} {status}" for status, count in statuses)
        raise ServiceError(f"cannot check the texts of this run ({known}): {error}") from None


def _difference(sample: LoadSample, texts: Texts, expected: dict[int, bytes]) -> str:
    case = texts.cases[sample.case]
    return (
        f"prompt {case.prompt!r}, seed {case.seed}\n"
        f"  under load: {bytes.fromhex(sample.output)!r}\n  alone:      {expected[sample.case]!r}"
    )


def recorded(target: Testbed, plan: LoadPlan) -> Recording:
    """Run a load generator next to the router, and return its recording. Raises ServiceError if it fails."""
    command = target.network.command(ROUTER, [sys.executable, "-P", "-m", "loadtest.load.users"])
    with tempfile.TemporaryFile("w+", prefix="onesweep-load-") as log:
        generator = Child(command, asdict(plan), log)
        try:
            output, code = "".join(generator.lines()), generator.process.wait()
        finally:
            generator.end(0.0)
        if code == 0:
            return Recording.from_json(output)
        log.seek(0)
        last = log.read().strip().splitlines()[-1:] or ["no output"]
        raise ServiceError(f"the load generator exited with code {code}: {last[0]}")


# The table, notes below it, and records for JSON

RUNS: tuple[Column[dict[str, Any]], ...] = (
    *map(text_column, ("mode", "users", "requests", "right", "refused", "failed", "lost", "wrong")),
    number_column("right/s", "throughput_rps", 2),
    number_column("p50 ms", "p50_ms"),
    number_column("p95 ms", "p95_ms"),
    number_column("p99 ms", "p99_ms"),
    number_column("refused p95 ms", "refusal_p95_ms"),
    number_column("generator cores", "generator_cores", 2),
)


def run_notes(result: LoadResult) -> list[str]:
    """Sentences for which the table has no room."""
    f, o = result.metrics, result.metrics.outside
    outside = f"{o.refused} refused, {o.failed} failed, {o.lost} lost, {o.wrong} wrong"
    notes = [f"window {f.seconds:.1f} s; {o.requests} requests began outside it ({outside})"]
    if f.p95_ms is not None and f.p95_ms / 1000 > f.seconds / 2:
        notes.append("the window is shorter than two requests: raise --seconds for better numbers")
    notes += [f"failed {count} x: {failure}" for failure, count in f.failures.items()]
    if result.wrong:
        notes.append(f"wrong text: {result.wrong}")
    return notes


# Beyond the knee, p95 is more than SLOW_FACTOR times that of the fewest users, or more users give less than MIN_GROWTH
# times the throughput.
SLOW_FACTOR, MIN_GROWTH = 2.0, 1.05


def find_knee(results: Sequence[LoadResult]) -> tuple[LoadResult, bool]:
    """The run at the knee, and whether one is beyond it; results: one mode's, with increasing users."""
    first_ms = results[0].metrics.p95_ms
    for before, after in pairwise(results):
        f = after.metrics
        is_slow = f.p95_ms is None or first_ms is None or f.p95_ms > SLOW_FACTOR * first_ms
        if is_slow or f.throughput_rps < MIN_GROWTH * before.metrics.throughput_rps:
            return before, True
    return results[-1], False


def knee_note(result: LoadResult, found: bool) -> str:
    return f"{result.mode}: {'knee at' if found else 'no knee up to'} {_in_short(result)}"


def _in_short(result: LoadResult) -> str:
    f = result.metrics
    return f"{counted(result.users, 'user')}: {f.throughput_rps:.2f} right answers/s, p95 {number(f.p95_ms)} ms"


def run_record(result: LoadResult) -> dict[str, Any]:
    """A flat record: `throughput_rps`, `p50_ms`, ..., `refused`, `failed`, `lost`, `wrong`, and the other metrics."""
    metrics = asdict(result.metrics)
    counts = metrics.pop("counts")
    return {"mode": result.mode, "users": result.users, **counts, **metrics}


# The account: every request in exactly one class, and the sums of the classes

MAX_MESSAGES = 5  # most different failures shown

Judged = tuple[LoadSample, Outcome]


@dataclass(frozen=True)
class Counts:
    """Requests in each class; `requests` is their sum."""

    requests: int = 0
    right: int = 0
    refused: int = 0
    failed: int = 0
    lost: int = 0
    wrong: int = 0

    @property
    def trouble(self) -> int:
        """Number of requests with outcomes that a sound deployment does not have."""
        return self.failed + self.lost + self.wrong


@dataclass(frozen=True)
class LoadMetrics:
    """Metrics of a run. Percentiles are over right answers; None without any."""

    counts: Counts  # requests that began in the window
    # Requests that began before it, as users arrived and the deployment warmed up, or after it.
    outside: Counts
    seconds: float  # actual length of the window
    throughput_rps: float  # right answers per second that arrived in the window
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    refusal_p95_ms: float | None  # from sending a request to its refusal
    generator_cores: float  # the load generator's processor time per second
    failures: dict[str, int]  # the most frequent statuses with their sentences, and their counts


def judge(samples: Iterable[LoadSample], texts: dict[int, bytes]) -> list[Judged]:
    """:param texts: each answered case's text when run alone."""
    return [(sample, outcome_of(sample, texts.get(sample.case))) for sample in samples]


def count(judged: Iterable[Judged]) -> Counts:
    found = Counter(outcome for _, outcome in judged)
    return Counts(requests=found.total(), **{outcome.value: found[outcome] for outcome in Outcome})


def metrics_of(judged: Sequence[Judged], window: Window) -> LoadMetrics:
    """:param judged: every request of the run, whenever it began."""
    inside, outside = list[Judged](), list[Judged]()
    for each in judged:
        (inside if window.contains(each[0].begin_s) else outside).append(each)
    right = sorted(sample.latency_ms for sample, outcome in inside if outcome is Outcome.RIGHT)
    refusals = sorted(sample.latency_ms for sample, outcome in inside if outcome is Outcome.REFUSED)
    arrived = sum(outcome is Outcome.RIGHT and window.contains(each.end_s) for each, outcome in judged)
    failed = [sample for sample, outcome in inside if outcome is Outcome.FAILED]
    failures = Counter(": ".join(filter(None, (each.status, each.message))) for each in failed)
    return LoadMetrics(
        counts=count(inside),
        outside=count(outside),
        seconds=window.seconds,
        throughput_rps=arrived / window.seconds,
        p50_ms=percentile(right, 50),
        p95_ms=percentile(right, 95),
        p99_ms=percentile(right, 99),
        refusal_p95_ms=percentile(refusals, 95),
        generator_cores=window.processor_s / window.seconds,
        failures=dict(failures.most_common(MAX_MESSAGES)),
    )
