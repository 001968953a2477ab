"""Every request falls into exactly one class, and the metrics are those of the requests in the window."""

from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.plan import OK, OPEN, LoadSample, Outcome, Window, outcome_of
from loadtest.load.run import Counts, LoadMetrics, LoadResult, find_knee, judge, knee_note, metrics_of
from loadtest.report.table import percentile

TEXTS = {0: b"right", 1: b"other"}
WINDOW = Window(100.0, 110.0, 0.5)
CODES = [code.name for code in grpc.StatusCode] + [OPEN]

moments = st.floats(90, 120, allow_nan=False)
samples = st.builds(
    lambda case, begin_s, latency_s, status, own, retry, output: LoadSample(
        case, begin_s, begin_s + latency_s, status, own, retry, "", output.hex()
    ),
    st.sampled_from([0, 1]),
    moments,
    st.floats(0, 20),
    st.sampled_from(CODES),
    st.booleans(),
    st.none() | st.integers(0, 5000),
    st.sampled_from([b"right", b"other", b""]),
)


@given(samples)
def test_every_sample_has_its_outcome(sample: LoadSample) -> None:
    answered = sample.status == "OK"
    right = bytes.fromhex(sample.output) == TEXTS[sample.case]
    refused = sample.status == "RESOURCE_EXHAUSTED" and sample.retry_after_ms is not None
    lost = sample.status == OPEN or (sample.status == "DEADLINE_EXCEEDED" and sample.own_status)
    true = {
        Outcome.RIGHT: answered and right,
        Outcome.WRONG: answered and not right,
        Outcome.REFUSED: refused,
        Outcome.LOST: lost,
    }
    true[Outcome.FAILED] = not any(true.values())
    assert [outcome for outcome, passed in true.items() if passed] == [outcome_of(sample, TEXTS[sample.case])]


@given(st.lists(samples))
def test_requests_count_once_and_only_right_answers_have_latencies(run: list[LoadSample]) -> None:
    metrics = metrics_of(judge(run, TEXTS), WINDOW)
    for counts in (metrics.counts, metrics.outside):
        classes = [getattr(counts, outcome.value) for outcome in Outcome]
        assert sum(classes) == counts.requests
    assert metrics.counts.requests + metrics.outside.requests == len(run)
    assert metrics.counts.requests == sum(100 <= sample.begin_s < 110 for sample in run)
    right = [s for s in run if s.status == OK and bytes.fromhex(s.output) == TEXTS[s.case]]
    latencies = sorted(s.latency_ms for s in right if 100 <= s.begin_s < 110)
    assert (metrics.p50_ms is None) == (not latencies)
    if latencies:
        assert latencies[0] <= metrics.p50_ms <= metrics.p95_ms <= metrics.p99_ms <= latencies[-1]
        assert {metrics.p50_ms, metrics.p95_ms, metrics.p99_ms} <= set(latencies)
    arrived = sum(100 <= s.end_s < 110 for s in right)
    assert metrics.throughput_rps == pytest.approx(arrived / 10)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_sufficient_value(values: list[float], percent: int) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    enough = [v for v in ordered if sum(w <= v for w in ordered) * 100 >= percent * len(ordered)]
    assert found == min(enough)
    assert percentile([], percent) is None


def test_refusals_have_latencies_and_are_not_failures() -> None:
    refusals = [LoadSample(0, 101.0, 101.0 + i / 1000, "RESOURCE_EXHAUSTED", False, 1000) for i in (1, 2, 3)]
    metrics = metrics_of(judge(refusals, {}), WINDOW)
    assert metrics.refusal_p95_ms == pytest.approx(3.0)
    assert metrics.counts == Counts(requests=3, refused=3)
    assert metrics.counts.trouble == 0


def test_failures_are_listed_by_frequency_with_their_messages() -> None:
    failed = [LoadSample(0, 101.0, 102.0, "UNAVAILABLE", message=m) for m in ("host-1 is lost", "x", "host-1 is lost")]
    failed.append(LoadSample(0, 101.0, 102.0, "INTERNAL"))
    failures = metrics_of(judge(failed, {}), WINDOW).failures
    assert next(iter(failures.items())) == ("UNAVAILABLE: host-1 is lost", 2)
    assert set(failures) == {"UNAVAILABLE: host-1 is lost", "UNAVAILABLE: x", "INTERNAL"}


# The knee is the number of users before latency gives way or throughput grows no more.
METRICS = LoadMetrics(*(Counts(requests=10, right=10), Counts()), *(10.0, 5.0, 90.0, 100.0, 110.0, None, 0.1, {}))
LEVELS = (1, 2, 4, 8, 16)


def queue(capacity: int, users: int) -> LoadResult:
    """A server that works on `capacity` requests at a time, 100 ms each; the others wait."""
    p95, rate = 100.0 * max(1, users / capacity), 10.0 * min(users, capacity)
    return LoadResult("sweep", users, replace(METRICS, p95_ms=p95, throughput_rps=rate))


@pytest.mark.parametrize(("capacity", "knee"), [(1, "knee at 1 user:"), (4, "knee at 4 users"), (5, "knee at 8 users")])
def test_the_knee_of_a_queue_is_found(capacity: int, knee: str) -> None:
    assert knee_note(*find_knee([queue(capacity, users) for users in LEVELS])).startswith(f"sweep: {knee}")
    assert knee_note(*find_knee([queue(capacity, 1)])).startswith("sweep: no knee up to 1 user:")


def test_doubled_latency_is_over_the_knee_even_if_throughput_grows() -> None:
    soft = [replace(METRICS, p95_ms=60.0 * users, throughput_rps=3.0 * users) for users in LEVELS]
    results = [replace(queue(100, users), metrics=each) for users, each in zip(LEVELS, soft, strict=True)]
    assert knee_note(*find_knee(results)).startswith("sweep: knee at 2 users")
