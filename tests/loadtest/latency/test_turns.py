"""Turns rotate, failures are told of, and what ended is started again: with a deployment that is not there."""

from collections.abc import Callable
from typing import Any

import pytest

from loadtest.latency.settings import Length
from loadtest.latency.turns import RequestSeries, Seat, take_turns
from loadtest.workload.caller import Access
from loadtest.workload.testbed import Network, Testbed
from loadtest.workload.variants import ModeVariant
from stages.errors import ServiceError
from tests.loadtest.latency.conftest import account

Account = Callable[..., dict[str, Any]]


class Pretence:
    """A deployment and a caller in one. `broken`: processes that ended."""

    def __init__(self, account: Account) -> None:
        self.account, self.broken, self.curable = account, dict[str, str](), True
        self.calls: list[dict[str, Any]] = []
        self.revived: list[str] = []

    def ask(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.calls += calls
        if self.broken:
            return [{"error": "a host is lost"} for _ in calls]
        return [{"latency_ms": 90.0, "first_byte_ms": 80.0, "account": self.account()} for _ in calls]

    def ended(self) -> dict[str, str]:
        return dict(self.broken)

    def revive(self, name: str) -> None:
        self.revived.append(name)
        if self.curable:
            del self.broken[name]

    def wait_ready(self) -> None:
        if self.broken:
            raise ServiceError("not ready after 60 s")


@pytest.fixture
def pretence() -> Pretence:
    return Pretence(account)


@pytest.fixture
def seats(pretence: Pretence) -> list[Seat]:
    testbed = Testbed(Access("127.0.0.1:1"), Network("wan", 2, 7700), None, pretence)  # type: ignore[arg-type]
    vars(testbed)["caller"] = pretence
    return [Seat(testbed, RequestSeries(ModeVariant(mode), Length(8))) for mode in ("sweep", "chunked", "ar")]


def test_turns_rotate_after_a_warm_up_and_share_their_seeds(seats: list[Seat], pretence: Pretence) -> None:
    told = [seat.series.call(0, 0)["mode"] for seat, _ in take_turns(seats, 2, seed=5)]
    assert told == ["sweep", "chunked", "ar", "chunked", "ar", "sweep"]
    asked = [(call["mode"], call["seed"]) for call in pretence.calls]
    assert asked[:3] == [("sweep", 5), ("chunked", 5), ("ar", 5)]
    assert asked[3:] == list(zip(told, [5, 5, 5, 6, 6, 6], strict=True))


def test_a_host_that_ends_is_told_of_and_started_again(seats: list[Seat], pretence: Pretence) -> None:
    errors = []
    for number, (_, [sample]) in enumerate(take_turns(seats, 2, 0)):
        errors.append(sample.error)
        if number == 0:
            pretence.broken["host-2"] = "killed"
    assert errors == ["", "host-2 ended (killed); started again: a host is lost", "", "", "", ""]
    assert pretence.revived == ["host-2"]
