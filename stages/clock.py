"""The clock that hosts, routers and clients read, which a simulation replaces by its own.

Timers of asyncio follow the event loop's time, so a loop with a virtual time needs the clock to go with it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_replacement: Callable[[], float] | None = None


def monotonic() -> float:
    """Seconds since some moment, as finely as the machine tells them."""
    return time.monotonic() if _replacement is None else _replacement()


@contextmanager
def replaced(seconds: Callable[[], float]) -> Iterator[None]:
    """Have it read `seconds` within the block, in all threads."""
    global _replacement
    before, _replacement = _replacement, seconds
    try:
        yield
    finally:
        _replacement = before
