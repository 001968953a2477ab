"""How this process's C allocator treats large buffers."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def return_large_buffers() -> None:
    """Give buffers of a megabyte and more back to the system as soon as they are freed, where libc is glibc.

    Left to itself, glibc raises that limit to the largest buffer freed so far (up to 32 MB) and keeps scratch space
    of the widest layers for good: a third of a 200 MB block's own size.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
