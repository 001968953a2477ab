"""The arithmetic of a link, for any packets at any times."""

import math
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtest.lab.forwarder import DROPPED, Channel
from loadtest.lab.profile import MTU, Link

patient = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
MS = 1_000_000
SIZES = st.integers(20, MTU)
COMINGS = st.lists(st.tuples(st.integers(0, 5 * MS), SIZES), min_size=1, max_size=60)
"""Nanoseconds since the packet before, and bytes."""
RATES = st.floats(0.1, 10_000)


def play(channel: Channel, comings: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(time of coming, bytes, time of delivery) of each packet."""
    now_ns, played = MS, []
    for gap_ns, size in comings:
        now_ns += gap_ns
        played.append((now_ns, size, channel.admit(now_ns, size)))
    return played


@patient
@given(st.floats(0, 200), RATES, SIZES)
def test_a_single_packet_takes_its_size_at_the_rate_and_the_delay(delay_ms: float, rate_mbps: float, size: int) -> None:
    channel = Channel(Link(delay_ms=delay_ms, rate_mbps=rate_mbps), "")
    ((came_ns, _, delivered_ns),) = play(channel, [(0, size)])
    assert abs(delivered_ns - came_ns - (delay_ms * 1e6 + size * 8000 / rate_mbps)) <= 2


@patient
@given(COMINGS, RATES, st.floats(0, 1), st.floats(0, 0.5))
def test_packets_keep_their_order_and_none_is_early(
    comings: list[tuple[int, int]], rate_mbps: float, share: float, loss: float
) -> None:
    link = Link(delay_ms=10, jitter_ms=10 * share, rate_mbps=rate_mbps, loss=loss)
    played = [packet for packet in play(Channel(link, "a"), comings) if packet[2] != DROPPED]
    assert all(before[2] <= after[2] for before, after in pairwise(played))
    for came_ns, size, delivered_ns in played:
        assert delivered_ns - came_ns >= (10 - link.jitter_ms) * MS + size * 8000 / rate_mbps - 3


@patient
@given(COMINGS, RATES, st.floats(1.5, 20))
def test_packets_follow_each_other_at_the_rate_and_only_those_that_do_not_fit_the_queue_are_dropped(
    comings: list[tuple[int, int]], rate_mbps: float, queue_kb: float
) -> None:
    link = Link(rate_mbps=rate_mbps, queue_ms=8 * queue_kb / rate_mbps)
    ns_per_byte, waiting_ends_ns = 8000 / rate_mbps, 0
    for came_ns, size, delivered_ns in play(Channel(link, ""), comings):
        waiting_bytes = max(0, waiting_ends_ns - came_ns) / ns_per_byte
        slack = 2 + 60 / ns_per_byte  # the error of rounding to nanoseconds
        if delivered_ns == DROPPED:
            assert waiting_bytes + size > link.queue_bytes - slack
        else:
            assert waiting_bytes + size <= link.queue_bytes + slack
            assert abs(delivered_ns - max(came_ns, waiting_ends_ns) - size * ns_per_byte) <= 2
            waiting_ends_ns = delivered_ns


@patient
@given(st.integers(0, 10_000), st.floats(0.01, 0.9))
def test_loss_is_random_and_repeatable(seed: int, loss: float) -> None:
    count = 2000

    def dropped() -> list[bool]:
        channel = Channel(Link(loss=loss), str(seed))
        return [delivery == DROPPED for _, _, delivery in play(channel, [(1, 100)] * count)]

    drops = dropped()
    assert drops == dropped()
    assert abs(sum(drops) - count * loss) < 6 * math.sqrt(count * loss * (1 - loss))
