"""An eye on the clock while one option writes: when another one has to take over."""

from __future__ import annotations

import time

from serving.conditions import Conditions
from serving.frontier import Option


class Watch:
    """How long `option` may go on, where `other` is the quickest way to finish what it leaves."""

    def __init__(self, conditions: Conditions, option: Option, other: Option, count: int) -> None:
        """:param count: bytes to write."""
        self.conditions, self.option, self.other = conditions, option, other
        self._left, self._written, self._pieces = count, 0, 0
        self._begin = time.perf_counter()

    def see(self, count: int) -> None:
        """A piece of `count` bytes came."""
        self._left, self._written, self._pieces = self._left - count, self._written + count, self._pieces + 1

    def spare_ms(self, left_ms: float) -> float | None:
        """How long to wait for the next piece before `other` takes over: 0 = it is late already, None = until it comes.

        :param left_ms: until the text should be done.
        """
        own, other_ms = (
            self.conditions.forecast(self.option, self._left),
            self.conditions.forecast(self.other, self._left).ms,
        )
        took_ms = (time.perf_counter() - self._begin) * 1000
        # what this text itself took so far may be more than anybody expected
        own_ms = max(own.ms, took_ms / self._written * self._left) if self._written else own.ms
        piece_ms = max(own.sweep_ms, took_ms / self._pieces) if self._pieces else own.sweep_ms
        spare_ms = left_ms - other_ms
        if piece_ms <= spare_ms:
            return spare_ms
        return None if own_ms <= left_ms or own_ms <= other_ms else 0.0
