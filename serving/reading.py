"""A text on its way to who asked for it: read from symbols, cut where the request says."""

from __future__ import annotations

from collections.abc import Sequence

from serving.spelling import Reader
from serving.stop import StopCutter


class Reading:
    """Feeds a reader's text through stop strings and a limit of bytes. The text does not depend on its pieces."""

    def __init__(self, reader: Reader, stops: Sequence[bytes], most_bytes: int | None) -> None:
        """:param most_bytes: None = no limit but that of symbols. No character is cut in two for it."""
        self._reader, self._cutter, self._left = reader, StopCutter(stops), most_bytes

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._cutter.stopped

    @property
    def over(self) -> bool:
        """Whether nothing more can come of it."""
        return self.stopped or self._left == 0

    def feed(self, symbols: bytes) -> bytes:
        """What can be handed out now."""
        return self._within(self._cutter.feed(self._reader.feed(symbols)))

    def end(self) -> bytes:
        """What was held back until the end."""
        return self._within(self._cutter.feed(self._reader.end()) + self._cutter.end())

    def _within(self, text: bytes) -> bytes:
        if self._left is None:
            return text
        if len(text) <= self._left:
            self._left -= len(text)
            return text
        end, self._left = self._left, 0
        while end and text[end] & 0xC0 == 0x80:  # in the middle of a character
            end -= 1
        return text[:end]
