"""How many threads compute: the same number on the same machine gives the same weights, bit for bit."""

from __future__ import annotations

import os

import torch

from stages.errors import InputError

MAX_THREADS = 1024


def set_threads(count: int | None) -> int:
    """Compute with `count` threads, by default one for each core that this process may use; return the number."""
    if count is not None and not 1 <= count <= MAX_THREADS:
        raise InputError(f"--threads must be from 1 to {MAX_THREADS}, not {count}")
    threads = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads
