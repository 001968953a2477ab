"""Turns rotate, after a warm-up: with a deployment that is not there."""

from typing import Any

from loadtest.latency.run import RequestSeries, take_turns
from loadtest.workload.caller import Access
from loadtest.workload.prompts import Length
from loadtest.workload.testbed import Network, Testbed
from serving.client.variants import ModeVariant
from tests.loadtest.latency.conftest import account


class Pretence:
    """A caller that answers every request."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def ask(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.calls += calls
        return [{"latency_ms": 90.0, "first_byte_ms": 80.0, "account": account()} for _ in calls]


def test_turns_rotate_after_a_warm_up_and_share_their_seeds() -> None:
    pretence = Pretence()
    testbed = Testbed(Access("127.0.0.1:1"), Network("wan", 2, 7700), pretence)  # type: ignore[arg-type]
    every = [(testbed, RequestSeries(ModeVariant(mode), Length(8))) for mode in ("sweep", "chunked", "ar")]
    taken = [series.variant.mode for _, series, _ in take_turns(every, 2, at_once=1, seed=5)]
    assert taken == ["sweep", "chunked", "ar", "chunked", "ar", "sweep"]
    asked = [(call["mode"], call["seed"]) for call in pretence.calls]
    assert asked[:3] == [("sweep", 5), ("chunked", 5), ("ar", 5)]
    assert asked[3:] == list(zip(taken, [5, 5, 5, 6, 6, 6], strict=True))
