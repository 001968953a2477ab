"""How this process's C allocator treats what is freed."""

from __future__ import annotations

import asyncio
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES = 4 << 20
"""A buffer of this size is given back when it is freed. 1 MB keeps less, and costs 12 % of a wide block's time."""
KEPT_BYTES = 8 << 20
"""Smaller ones are kept up to this much."""
TRIM_S = 60.0
"""Trimming takes 1 to 2 ms of a process of 600 MB."""


def return_large_buffers() -> None:
    """Keep little of the memory that is freed, where libc is glibc.

    Left to itself, glibc raises both limits to the largest buffers freed so far (up to 32 and 64 MB), and what loading
    and warming up a block needed for a moment stays with the server for good.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def trim() -> None:
    """Give all memory that is freed back now: what loading and warming up left behind."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


async def keep_trimmed() -> None:
    """Trim once a minute, for ever: what is freed in the midst of a heap stays with the process otherwise."""
    while True:
        await asyncio.sleep(TRIM_S)
        trim()
