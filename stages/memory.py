"""Memory of the process: checks for room before weights are read, and gives memory back."""

import asyncio
import ctypes
import os
import sys

import psutil

from stages.device import cgroup_texts
from stages.errors import CheckpointError

# Of a control group: its limit, its usage, and the beginning of its sums' names.
_FILES = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
MEGABYTE = 1 << 20


def free_memory() -> int:
    """Bytes that this process can still allocate: of the machine, or of its container if that has less."""
    free = [int(psutil.virtual_memory().available)]
    for limit, usage, sums in _FILES:
        for most, used, lines in cgroup_texts(limit, usage, "memory.stat"):
            if most.strip().isdecimal():  # not "max"
                stat = dict(line.split() for line in lines.splitlines())
                # files in the page cache count as used, and make room
                cached = sum(int(stat.get(f"{sums}{kind}_file", 0)) for kind in ("active", "inactive"))
                free.append(int(most) - int(used) + cached)
    return max(0, min(free))


def require_memory(needed: int, what: str) -> None:
    """Raise CheckpointError if fewer than `needed` bytes are free."""
    free = free_memory()
    if needed > free:
        raise CheckpointError(
            f"not enough memory for {what}: {needed / MEGABYTE:.0f} MB needed, {free / MEGABYTE:.0f} MB free; "
            "cut the model into more parts, or use a larger machine"
        )


# Settings of the C allocator for freed memory.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A buffer of this size is given back when freed. 1 MB would keep less, but cost 12 % of a wide block's time.
LARGE_BYTES = 4 << 20
LOADING_BYTES = 1 << 20  # while matrices are laid out, which otherwise leaves holes of 10 MB per layer of an 8B model
KEPT_BYTES = 8 << 20  # smaller buffers are kept up to this total
TRIM_S = 60.0  # trimming takes 1 to 2 ms of a process of 600 MB


def return_large_buffers(large_bytes: int = LARGE_BYTES) -> None:
    """Keep little of the freed memory, if libc is glibc.

    By default glibc raises both limits to the largest buffers freed so far (up to 32 and 64 MB), so memory that loading
    and warming up a block needed only briefly would stay with the server for good.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def trim() -> None:
    """Give all freed memory back now, such as the remains of loading and warming up."""
    # With `return_large_buffers`: a ready host holds 1.04 of its block's bytes, not 1.35 (measured at commit 4f30dd7d).
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


# A token reads all weights, and looking up a page for every 4 KB of them takes a tenth of its time. glibc, which reads
# this setting when a process begins, then puts large buffers in pages of 2 MB.
_TUNABLES = "GLIBC_TUNABLES"


def with_large_pages() -> dict[str, str]:
    """The environment for a process with large pages for large buffers. An existing setting stays."""
    return {_TUNABLES: "glibc.malloc.hugetlb=1", **os.environ}


def begin_with_large_pages() -> None:
    """Restart this process with large pages, on the same command line, unless it has them. Only on Linux."""
    if sys.platform == "linux" and _TUNABLES not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_large_pages())


async def keep_trimmed() -> None:
    """Trim once a minute, forever: otherwise memory freed in the middle of a heap stays with the process."""
    while True:
        await asyncio.sleep(TRIM_S)
        trim()
