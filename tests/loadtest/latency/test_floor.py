"""The floor, by hand."""

import pytest

from loadtest.lab.profile import Link
from loadtest.latency.floor import BookedCost, Floor, floor_of
from tests.loadtest.latency.conftest import account

# A triangle of unequal links: (source, destination): (one-way ms, Mbit/s)
TRIANGLE: dict[tuple[str, str], Link] = {
    ("router", "host-1"): Link(10.0, 8.0),
    ("host-1", "router"): Link(11.0, 8.0),
    ("host-1", "host-2"): Link(20.0, 16.0),
    ("host-2", "host-1"): Link(25.0, 4.0),
    ("host-2", "router"): Link(40.0, 80.0),
    ("router", "host-2"): Link(41.0, 80.0),
}


def booked(mode: str, sweeps: int, wire_bytes: tuple[int, ...] = (), total: int = 0, **ms: float) -> BookedCost:
    return BookedCost(mode, sweeps, wire_bytes, total, ms.get("host_ms", 0.0), ms.get("local_ms", 0.0))


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        # 10 + 20 + 40; 8,000 bits at 8 Mbit/s + 16,000 at 16 + 4,000 at 80; what the hosts booked
        (booked("sweep", 1, (1000, 2000, 500), 3500, host_ms=7.0), Floor(70.0, 1.0 + 1.0 + 0.05, 7.0)),
        # every sweep was as large as the largest: nothing is left to choose
        (booked("chunked", 3, (1000, 1000, 1000), 9000), Floor(210.0, 3 * (1.0 + 0.5 + 0.1), 0.0)),
        # 500 bytes more than the three largest went over the fastest link: 4,000 bits at 80 Mbit/s
        (booked("chunked", 2, (1000, 1000, 1000), 3500), Floor(140.0, 1.0 + 0.5 + 0.1 + 0.05, 0.0)),
        # out 10, four times 20, three times back 25, home 40; three events of 100 bytes went beside; 1,000 bytes surely
        # on the inner link, the other 3,900 at best at 80 Mbit/s
        (
            booked("ar", 4, (200, 1000, 100), 200 + 4 * 1000 + 3 * 200 + 4 * 100),
            Floor(10 + 4 * 20 + 3 * 25 + 40, 8000 / 16000 + 3900 * 8 / 80000, 0.0),
        ),
        (booked("ar", 1), Floor(70.0, 0.0, 0.0)),
        # drafts of the last host go round the ring, too
        (
            BookedCost("ar-speculative", 4, (200, 1000, 100), 5200, 9.0),
            Floor(10 + 4 * 20 + 3 * 25 + 40, 8000 / 16000 + 3900 * 8 / 80000, 9.0),
        ),
        # three trips of a drawing: out, three times along, twice back, home; on the inner link three times the mean of
        # 1,000 bytes, the other 4,000 at best at 80 Mbit/s
        (
            booked("steps", 3, (900, 1000, 500), 7000, host_ms=9.0),
            Floor(10 + 3 * 20 + 2 * 25 + 40, 3 * 8000 / 16000 + 4000 * 8 / 80000, 9.0),
        ),
        (booked("chain", 1, (1000, 2000, 500), 3500, host_ms=7.0), Floor(70.0, 1.0 + 1.0 + 0.05, 7.0)),
        (booked("local", 0, local_ms=12.0), Floor(0.0, 0.0, 12.0)),
        # a quarter of 70 + 50 on the hosts and of 2.05 on the links, three quarters of 70; the drafter's before all
        (
            BookedCost("resample", 1, (1000, 2000, 500), 3500, 120.0, 30.0, slowest_ms=70.0, batches=4),
            Floor(70.0, 2.05 / 4, 30.0 + 52.5 + 30.0),
        ),
        # a link that is slower than any host is what the other batches wait for
        (
            BookedCost("resample", 1, (1000, 20_000, 500), 21_500, 12.0, slowest_ms=7.0, batches=4),
            Floor(70.0, 11.05 / 4 + 7.5, 3.0),
        ),
    ],
    ids=[
        *("one sweep", "equal sweeps", "unequal sweeps", "ar", "one byte of ar", "hosts that draft", "steps"),
        *("chain", "no sweep", "batches", "a slow link"),
    ],
)
def test_the_floor_over_unequal_links_is_that_by_hand(cost: BookedCost, expected: Floor) -> None:
    floor = floor_of(cost, ("host-1", "host-2"), lambda a, b: TRIANGLE[a, b])
    assert (floor.delay_ms, floor.compute_ms) == (expected.delay_ms, expected.compute_ms)
    assert floor.serialisation_ms == pytest.approx(expected.serialisation_ms)
    assert floor.total_ms == pytest.approx(expected.total_ms)


def test_a_single_host_forwards_to_itself() -> None:
    for mode, sweeps, expected_ms in [("ar", 5, 21.0), ("sweep", 1, 21.0), ("chunked", 5, 105.0)]:
        floor = floor_of(booked(mode, sweeps), ("host-1",), lambda a, b: TRIANGLE[a, b])
        assert floor.delay_ms == expected_ms


def test_the_account_separates_hosts_and_router() -> None:
    split = BookedCost.of(account(compute_ms=11.0))
    assert (split.host_ms, split.local_ms) == (8.0, 3.0)
    assert BookedCost.of(account(compute_ms=7.999)).local_ms == 0.0  # rounding
