"""Work on other threads that is never left half done behind somebody's back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`; who is cancelled meanwhile waits for the thread, so that nothing runs beside what
    comes next."""
    return await to_its_end(asyncio.to_thread(job, *args, **kwargs))


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work`, which a cancellation does not reach: it is raised when `work` is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
