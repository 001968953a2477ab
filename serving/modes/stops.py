"""Stop strings, cut out of a text that comes in pieces. It must not import torch: the gateway imports it."""

from collections.abc import Sequence


class StopCutter:
    """Cuts a text that comes in pieces before the first stop string that is complete in it.

    The cut does not depend on the pieces: it is the one of a text that comes byte by byte. Where two stop strings end
    with the same byte, the longer one counts.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """The text that is sure to stand before any stop string; nothing more once `stopped`."""
        if self.stopped:
            return b""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:  # in bytes, and the first that is complete: no later byte can take back what was shown
            _, cut = min(found)
            self.stopped, self._held = True, b""
            return text[:cut]
        keep = max((_begun(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> bytes:
        """The text that was held back because a stop string could have begun there."""
        held, self._held = self._held, b""
        return held


def _begun(text: bytes, stop: bytes) -> int:
    """Bytes at the end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
