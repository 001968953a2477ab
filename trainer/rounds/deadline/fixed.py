"""A round ends after so many seconds."""

from __future__ import annotations

from collections.abc import Sequence


class Fixed:
    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        return self.limit_s
