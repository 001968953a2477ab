"""Freed memory goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes

import psutil
import pytest

from stages import allocator
from stages.allocator import keep_trimmed

MB = 1 << 20


@pytest.mark.skipif(getattr(ctypes.CDLL(None), "malloc_trim", None) is None, reason="the C library is not glibc")
def test_what_is_freed_in_the_midst_of_a_heap_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "TRIM_S", 0.01)
    process = psutil.Process()
    kept = [bytes(8000) for _ in range(16_000)]  # 128 MB in small pieces
    del kept[:-1:2], kept[: len(kept) // 2]  # the last one stays, above all that is free
    before = process.memory_info().rss

    async def for_a_while() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep_trimmed(), 0.5)

    asyncio.run(for_a_while())
    assert process.memory_info().rss < before - 20 * MB
