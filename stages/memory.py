"""Memory of the process: room for weights, checked before they are read; and memory given back."""

import asyncio
import contextlib
import ctypes
import mmap
from pathlib import Path

import numpy as np
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


_MADV_COLLAPSE = 25  # of Linux 6.1 and newer; others refuse it, and nothing changes
LARGE_PAGE_BYTES = 2 << 20
_PAGES = Path("/proc/self/pagemap")
_ENTRY_BYTES, _OWN = 8, 1 << 63 | 1 << 56  # of each page; the bits that say it is held, and by no other process


def use_large_pages() -> None:
    """Move what the process holds into pages of 2 MB, where the system is Linux.

    A token reads all weights, and to look up a page for every 4 KB of them takes a tenth of its time. What is not held
    wholly stays as it is: a large page would fill its holes, too, such as those of each thread's stack. So does what
    is shared with others that were forked as this process was.
    """
    madvise, small = ctypes.CDLL(None).madvise, LARGE_PAGE_BYTES // mmap.PAGESIZE
    with contextlib.suppress(OSError), _PAGES.open("rb") as pages:  # other systems have no such file, or hide it
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, rights, _, _, inode, *name = line.split()
            if rights != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
                continue
            begin, end = (int(address, 16) for address in place.split("-"))
            begin, end = -(-begin // LARGE_PAGE_BYTES), end // LARGE_PAGE_BYTES
            pages.seek(begin * small * _ENTRY_BYTES)
            entries = np.frombuffer(pages.read(max(0, end - begin) * small * _ENTRY_BYTES), "<u8").reshape(-1, small)
            for number in np.flatnonzero(((entries & _OWN) == _OWN).all(axis=1)):
                address = (begin + int(number)) * LARGE_PAGE_BYTES
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(LARGE_PAGE_BYTES), _MADV_COLLAPSE)


async def keep_trimmed() -> None:
    """Trim once a minute, for ever: what is freed in the midst of a heap stays with the process otherwise."""
    while True:
        await asyncio.sleep(TRIM_S)
        trim()
