"""The losses of a run, round by round, as its log has them: a curve that a restart does not cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.rounds.store import Record

MOST_POINTS = 100
"""Of a part; once there are more rounds, a point stands for 2, 4, 8... of them."""


@dataclass
class Point:
    """Closed rounds of a part, in a row."""

    first: int
    last: int
    updates: int = 0
    """Merged."""
    late: int = 0
    """Of these, handed in for an earlier round."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, losses: Mapping[str, float]) -> None:
        for name, nats in losses.items():
            self.sums[name] += nats
            self.counts[name] += 1

    def extend(self, other: Point) -> None:
        """Stand for the rounds that follow, too."""
        self.last, self.updates, self.late = other.last, self.updates + other.updates, self.late + other.late
        for name, total in other.sums.items():
            self.sums[name] += total
            self.counts[name] += other.counts[name]

    def losses(self) -> dict[str, float]:
        """Means over the updates that told them, in nats."""
        return {name: total / self.counts[name] for name, total in self.sums.items()}


class Curves:
    """A curve for each part, from the records of a log in their order."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], Record] = {}
        self._points: dict[str, list[Point]] = defaultdict(list)
        self._span: dict[str, int] = defaultdict(lambda: 1)

    def of(self, part: str) -> Sequence[Point]:
        """In order, at most MOST_POINTS. Not to be changed."""
        return self._points[part]

    def take(self, record: Record) -> None:
        if record["kind"] == "accepted":
            self._pending[record["part"], record["id"]] = record
        elif record["kind"] == "closed":
            part, round_ = record["part"], record["round"]
            merged = [self._pending.pop((part, name)) for name in record["updates"]]
            point = Point(round_, round_, len(merged), sum(update["round"] < round_ for update in merged))
            for update in merged:
                point.add(update["losses"])
            self._append(part, point)

    def _append(self, part: str, point: Point) -> None:
        points = self._points[part]
        if points and points[-1].last - points[-1].first + 1 < self._span[part]:
            points[-1].extend(point)
            return
        points.append(point)
        if len(points) > MOST_POINTS:
            self._span[part] *= 2
            for left, right in zip(points[::2], points[1::2], strict=False):
                left.extend(right)
            del points[1::2]
