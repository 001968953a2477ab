"""Whether there is room for weights, asked before they are read."""

from __future__ import annotations

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
