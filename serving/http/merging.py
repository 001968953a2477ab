"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    error: Exception | None


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources as they come. The first error ends all of them, and so does leaving early."""
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    left = len(pumps)
    try:
        while left:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                left -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as caught:
        error = caught
    await queue.put(_End(error))
