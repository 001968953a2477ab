"""Histograms that hot code adds to, and the families of metrics: plain arrays, which a scrape reads.

prometheus_client takes a lock and one or two microseconds for each addition; these take a fifth of a microsecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts of the values in each bucket, and their sum. Only one thread adds."""

    # one writer needs no lock: a scrape copies on the event loop that writes; a small model's hop is 150 us of Python

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """:param bounds: upper ends, each inclusive; a last bucket takes what is above them."""
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __copy__(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.total = self.counts.copy(), self.total
        return other

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper end, values up to it), the last for "+Inf": the count of all."""
        so_far, rows = 0, []
        for end, count in zip([*map(float, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            rows.append((str(end), float(so_far)))
        return rows


@dataclass(frozen=True)
class MetricFamily:
    """A metric as the documentation lists it; a counter's name ends with `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names in queries."""
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


MetricValues = Mapping[str, Mapping[tuple[str, ...], float | Histogram]]  # values by family name and labels
