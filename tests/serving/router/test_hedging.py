"""How long a result is waited for, and how many second tries there are."""

from __future__ import annotations

from serving.router.ring import HEDGE_SHARE, HEDGES, LEAST_S, Hedging


def taught(times_s: list[float]) -> Hedging:
    patience = Hedging()
    for time_s in times_s:
        patience.learn("ar", time_s)
    return patience


def test_it_waits_longer_than_results_take() -> None:
    assert taught([0.01] * 100).wait_s("ar", 60.0) == LEAST_S
    assert 4.0 <= taught([4.0] * 100).wait_s("ar", 60.0) < 4.5
    uneven = taught([2.0, 4.0] * 100)
    assert uneven.wait_s("ar", 60.0) > 4.0


def test_what_was_not_seen_gets_time() -> None:
    assert Hedging().wait_s("chain", 60.0) == 5 * LEAST_S


def test_a_near_deadline_asks_for_a_second_try_sooner() -> None:
    patience = taught([0.5] * 100)
    assert patience.wait_s("ar", 60.0) == LEAST_S
    assert 0.5 <= patience.wait_s("ar", 1.6) <= 0.61
    assert 0.5 <= patience.wait_s("ar", 0.2) < LEAST_S, "but not before results usually come"


def test_second_tries_are_few() -> None:
    patience = Hedging()
    assert sum(patience.may_hedge() for _ in range(100)) == HEDGES
    for _ in range(int(2 / HEDGE_SHARE)):
        patience.learn("ar", 0.1)
    assert sum(patience.may_hedge() for _ in range(100)) in (1, 2)
