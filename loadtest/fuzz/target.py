"""What can be fuzzed: takes a number of inputs at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable

from loadtest.fuzz.findings import Tally

AT_ONCE = 16


class Target(ABC):
    """One of `settings.TARGETS`."""

    name: str
    batch_inputs: int = 250

    def __init__(self) -> None:
        self.tally = Tally(self.name)

    @abstractmethod
    async def send(self, count: int) -> None:
        """Send about `count` inputs; book them, and what came of them."""

    async def close(self) -> None:
        """Let go of what it holds."""
        return


async def all_of(calls: Iterable[Awaitable[object]], at_once: int = AT_ONCE) -> None:
    """Await all, some at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(call: Awaitable[object]) -> None:
        async with places:
            await call

    await asyncio.gather(*map(one, calls))
