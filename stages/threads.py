"""Work on other threads that is never left half done behind somebody's back."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NICE = 5  # what a thread is made that works beside requests: they come first


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


async def in_low_priority_thread(job: Callable[[], T]) -> T:
    """Run `job` on a thread that gives way to those of requests, and that ends with it."""

    def give_way() -> None:
        with contextlib.suppress(OSError, AttributeError):  # threads have no priorities of their own everywhere
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    thread = ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=give_way)
    try:
        return await to_its_end(asyncio.get_running_loop().run_in_executor(thread, job))
    finally:
        thread.shutdown(wait=False)
