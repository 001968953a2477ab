"""Memory of the process: room for weights, checked before they are read; and memory given back."""

import asyncio
import ctypes
import os
import sys
from pathlib import Path

import psutil

from stages.errors import CheckpointError

_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_CGROUP = Path("/sys/fs/cgroup")
MEGABYTE = 1 << 20


def free_memory() -> int:
    """Bytes that this process can still take: of the machine, or of its container if that has less."""
    free = [int(psutil.virtual_memory().available)]
    for limit, usage in _LIMITS:
        try:
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, min(free))


def require_memory(needed: int, what: str) -> None:
    """Raises CheckpointError when there are fewer than `needed` bytes."""
    free = free_memory()
    if needed > free:
        raise CheckpointError(
            f"not enough memory for {what}: {needed / MEGABYTE:.0f} MB needed, {free / MEGABYTE:.0f} MB free; "
            "cut the model into more parts, or use a larger machine"
        )


# How this process's C allocator treats what is freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A buffer of this size is given back when it is freed. 1 MB keeps less, and costs 12 % of a wide block's time.
LARGE_BYTES = 4 << 20
LOADING_BYTES = 1 << 20  # while matrices are laid out, which else leave holes of 10 MB a layer of 8B
KEPT_BYTES = 8 << 20  # smaller ones are kept up to this much
TRIM_S = 60.0  # trimming takes 1 to 2 ms of a process of 600 MB


def return_large_buffers(large_bytes: int = LARGE_BYTES) -> None:
    """Keep little of the memory that is freed, where libc is glibc.

    Left to itself, glibc raises both limits to the largest buffers freed so far (up to 32 and 64 MB), and what loading
    and warming up a block needed for a moment stays with the server for good.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def trim() -> None:
    """Give all memory that is freed back now: what loading and warming up left behind."""
    # With `return_large_buffers`: a ready host holds 1.04 of its block's bytes, not 1.35 (measured at commit 4f30dd7d).
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


# A token reads all weights, and to look up a page for every 4 KB of them takes a tenth of its time. glibc, which reads
# this as a process begins, has large buffers in pages of 2 MB.
_TUNABLES = "GLIBC_TUNABLES"


def with_large_pages() -> dict[str, str]:
    """The environment for a process whose large buffers are to have large pages. One that is set stays."""
    return {_TUNABLES: "glibc.malloc.hugetlb=1", **os.environ}


def begin_with_large_pages() -> None:
    """Begin this process again, on the same command line, if it was not begun so, and the system is Linux."""
    if sys.platform == "linux" and _TUNABLES not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_large_pages())


async def keep_trimmed() -> None:
    """Trim once a minute, for ever: what is freed in the midst of a heap stays with the process otherwise."""
    while True:
        await asyncio.sleep(TRIM_S)
        trim()
