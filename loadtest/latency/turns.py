"""Requests of all variants take turns in a rotating order: a slow moment of the machine falls on every one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.latency.floor import BookedCost, Course, Floor
from loadtest.latency.settings import Length
from loadtest.workload.prompts import NOVEL, Prompts
from loadtest.workload.testbed import Testbed
from loadtest.workload.variants import ModeVariant

NOTHING = Floor(0.0, 0.0, 0.0)  # of a request that failed


@dataclass(frozen=True)
class RequestSeries:
    """Requests that differ in nothing but their prompt and seed: one row of the table."""

    variant: ModeVariant
    length: Length
    prompts: Prompts = NOVEL

    def call(self, number: int, seed: int) -> dict[str, Any]:
        """Arguments of one `Client.generate` or `Client.draw`: the request with this number."""
        asked, count = self.prompts.text(number), self.length.count
        if self.length.draws:
            return {"classes": asked, "levels": count, "seed": seed, **self.variant.request()}
        return {"prompt": asked, f"max_{self.length.unit}": count, "seed": seed, **self.variant.request()}


@dataclass(frozen=True)
class Sample:
    """One request: its times at the client and its account, or the reason why it failed."""

    seed: int
    number: int = 0  # of the request of its series; decides its prompt
    latency_ms: float = 0.0  # from the call to the end of the account
    first_byte_ms: float = 0.0
    floor: Floor = NOTHING
    account: dict[str, Any] = field(default_factory=dict)  # `Result.as_json()`, or that of pictures
    error: str = ""


def ended_well(samples: Sequence[Sample]) -> tuple[list[Sample], str | None]:
    """The requests that ended well, and the most frequent reason why others did not."""
    failed = Counter(sample.error for sample in samples if sample.error)
    return [sample for sample in samples if not sample.error], failed.most_common(1)[0][0] if failed else None


def take_turns(
    testbed: Testbed, every: Sequence[RequestSeries], requests: int, at_once: int, seed: int
) -> Iterator[tuple[RequestSeries, list[Sample]]]:
    """`requests` turns of each series, after one that warms up and is left out. A failure is a sample like any other.

    Turn i of every series has the same prompts and seeds.

    :param at_once: requests made at the same time in a turn.
    """
    for series in every:
        _turn(testbed, series, range(at_once), seed)
    for i in range(requests):
        # in another order each time: no series always follows the one that leaves the machine hot or the links busy
        first, numbers = i % len(every), range(i * at_once, (i + 1) * at_once)
        for series in (*every[first:], *every[:first]):
            yield series, _turn(testbed, series, numbers, seed)


def sample_of(testbed: Testbed, number: int, seed: int, answer: dict[str, Any]) -> Sample:
    """One answer of the caller, with its floor."""
    if "error" in answer:
        return Sample(seed, number, error=answer["error"])
    network = testbed.network
    floor = Course(network.nodes[1:], network.link).floor(BookedCost.of(answer["account"]))
    return Sample(seed, number, answer["latency_ms"], answer["first_byte_ms"], floor, answer["account"])


def _turn(testbed: Testbed, series: RequestSeries, numbers: range, seed: int) -> list[Sample]:
    """The requests with these numbers; number 0 has the seed `seed`."""
    answers = testbed.caller.ask([series.call(number, seed + number) for number in numbers])
    return [sample_of(testbed, n, seed + n, answer) for n, answer in zip(numbers, answers, strict=True)]
