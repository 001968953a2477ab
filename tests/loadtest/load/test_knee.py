"""The knee is the number of users before latency gives way or throughput grows no more."""

from dataclasses import replace

import pytest

from loadtest.load.run import Counts, LoadFigures, LoadResult, find_knee, knee_note

FIGURES = LoadFigures(*(Counts(requests=10, right=10), Counts()), *(10.0, 5.0, 90.0, 100.0, 110.0, None, 0.1, {}))
LEVELS = (1, 2, 4, 8, 16)


def queue(capacity: int, users: int) -> LoadResult:
    """A server that works on `capacity` requests at a time, 100 ms each; the others wait."""
    p95, rate = 100.0 * max(1, users / capacity), 10.0 * min(users, capacity)
    return LoadResult("sweep", users, replace(FIGURES, p95_ms=p95, throughput_rps=rate))


@pytest.mark.parametrize(("capacity", "knee"), [(1, "knee at 1 user:"), (4, "knee at 4 users"), (5, "knee at 8 users")])
def test_the_knee_of_a_queue(capacity: int, knee: str) -> None:
    assert knee_note(*find_knee([queue(capacity, users) for users in LEVELS])).startswith(f"sweep: {knee}")
    assert knee_note(*find_knee([queue(capacity, 1)])).startswith("sweep: no knee up to 1 user:")


def test_latency_that_doubles_is_over_the_knee_even_where_throughput_grows() -> None:
    soft = [replace(FIGURES, p95_ms=60.0 * users, throughput_rps=3.0 * users) for users in LEVELS]
    results = [replace(queue(100, users), figures=each) for users, each in zip(LEVELS, soft, strict=True)]
    assert knee_note(*find_knee(results)).startswith("sweep: knee at 2 users")
