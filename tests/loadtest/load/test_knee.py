"""The climb ends where latency gives way or throughput grows no more, and the knee is the level before."""

from dataclasses import replace

import pytest

from loadtest.load.run import Counts, LoadFigures, LoadResult, climb, knee_note, levels, over_note

FIGURES = LoadFigures(*(Counts(requests=10, right=10), Counts()), *(10.0, 5.0, 90.0, 100.0, 110.0, None, 0.1, {}))


def queue(capacity: int, users: int) -> LoadResult:
    """A server that works on `capacity` requests at a time, 100 ms each; the others wait."""
    p95, rate = 100.0 * max(1, users / capacity), 10.0 * min(users, capacity)
    return LoadResult("sweep", users, replace(FIGURES, p95_ms=p95, throughput_rps=rate))


@pytest.mark.parametrize(("capacity", "knee", "last"), [(1, 1, 2), (4, 4, 8), (5, 8, 16)])
def test_the_knee_of_a_queue(capacity: int, knee: int, last: int) -> None:
    found = climb("sweep", 256, lambda mode, users: queue(capacity, users))
    assert (found.knee, found.results[-1].users) == (knee, last)
    assert found.knee_result is found.results[-2]
    note = knee_note(found)
    assert note.startswith(f"sweep: knee at {knee} user")
    assert f"with {last}: " in note


def test_latency_that_doubles_ends_the_climb_even_where_throughput_grows() -> None:
    def soft(mode: str, users: int) -> LoadResult:
        return replace(queue(100, users), figures=replace(FIGURES, p95_ms=60.0 * users, throughput_rps=3.0 * users))

    found = climb("ar", 256, soft)
    assert (found.knee, found.ended) == (2, "p95 is 4.0 x that of one user")


def test_levels_double_and_end_with_the_most() -> None:
    assert list(levels(1)) == [1]
    assert list(levels(8)) == [1, 2, 4, 8]
    assert list(levels(9)) == [1, 2, 4, 8, 9]


def test_over_the_knee_the_share_of_its_right_answers_is_told() -> None:
    knee, over = queue(4, 4), queue(4, 40)
    assert over_note(knee, over).startswith("sweep: 40 users get 100 % of that; nobody was refused")
    refused = replace(over.figures, throughput_rps=30.0, refusal_p95_ms=4.0, counts=Counts(10, 5, refused=5))
    assert over_note(knee, replace(over, figures=refused)) == (
        "sweep: 40 users get 75 % of that; 5 refusals, p95 4.0 ms"
    )
