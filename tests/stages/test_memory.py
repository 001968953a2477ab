"""Freed memory goes back to the system."""

import asyncio
import ctypes

import psutil
import pytest

from stages import memory as allocator
from stages.memory import keep_trimmed

MB = 1 << 20


@pytest.mark.skipif(getattr(ctypes.CDLL(None), "malloc_trim", None) is None, reason="the C library is not glibc")
async def test_what_is_freed_in_the_midst_of_a_heap_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "TRIM_S", 0.01)
    process = psutil.Process()
    kept = [bytes(8000) for _ in range(16_000)]  # 128 MB in small pieces
    del kept[:-1:2], kept[: len(kept) // 2]  # the last one stays, above all that is free
    before = process.memory_info().rss
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(keep_trimmed(), 0.5)
    assert process.memory_info().rss < before - 20 * MB
