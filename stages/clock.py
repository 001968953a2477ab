"""The clock that hosts, routers and clients read, and that a simulation replaces with its own.

asyncio's timers follow the event loop's time, so a loop with virtual time needs a matching clock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_replacement: Callable[[], float] | None = None


def monotonic() -> float:
    """Seconds since an arbitrary moment, in the machine's finest resolution."""
    return time.monotonic() if _replacement is None else _replacement()


@contextmanager
def replaced(seconds: Callable[[], float]) -> Iterator[None]:
    """Make the clock read `seconds` within the block, in all threads."""
    global _replacement
    before, _replacement = _replacement, seconds
    try:
        yield
    finally:
        _replacement = before
