"""Calls that last: of several for the same thing the newest counts, and the others end when they notice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import grpc

from stages.refusal import Refusal, exhausted

MOST = 4
"""Open at once for one thing. More than one, for a call whose peer is gone lasts until keepalive has noticed."""
RETRY_MS = 2000


class Streams:
    """Those that are open, by what they are for."""

    def __init__(self) -> None:
        self._open: dict[Hashable, list[object]] = {}

    @contextmanager
    def begin(self, what: Hashable) -> Iterator[Callable[[], None]]:
        """One more, for the length of the block. Raises Refusal where there are too many.

        Yields what is to be called before each step: it raises Refusal once another has begun.
        """
        alike, mine = self._open.setdefault(what, []), object()
        if len(alike) >= MOST:
            raise exhausted(f"{MOST} calls for the same already: end one, or try again later", RETRY_MS)
        alike.append(mine)

        def check() -> None:
            if alike[-1] is not mine:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the same was begun anew: the older call ends")

        try:
            yield check
        finally:
            alike.remove(mine)
            if not alike:
                del self._open[what]
