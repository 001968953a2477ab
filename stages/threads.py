"""Work on other threads that a cancellation never leaves running unnoticed."""

import asyncio
import contextlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from stages.errors import WordedError

P = ParamSpec("P")
T = TypeVar("T")

NICE = 5  # of a thread that works alongside requests, which come first


async def in_thread(job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but a cancelled caller waits for the thread, so that the job never overlaps with the
    caller's next work."""
    return await run_to_completion(asyncio.to_thread(job, *args, **kwargs))


async def run_to_completion(work: Awaitable[T]) -> T:
    """Await `work` shielded from cancellation; CancelledError is raised once `work` is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # a worded error is for the caller, who has left
        await asyncio.wait([task])
        if not task.cancelled() and not isinstance(error := task.exception(), WordedError | None):
            logging.getLogger(__name__).error("work failed after its caller had left", exc_info=error)
        raise
    return task.result()


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel all tasks, and return once they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def in_low_priority_thread(job: Callable[[], T]) -> T:
    """Run `job` on a thread of its own, of lower priority than requests' threads; it ends with the job."""

    def lower_priority() -> None:
        with contextlib.suppress(OSError, AttributeError):  # not every system has priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    thread = ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=lower_priority)
    try:
        return await run_to_completion(asyncio.get_running_loop().run_in_executor(thread, job))
    finally:
        thread.shutdown(wait=False)


class FairPool:
    """Threads that callers share in turns. No caller gets all of them, and a job waits for at most one job of each
    other caller, never for all jobs of one. Lives on the event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free, self._most = threads, max(threads - 1, 1)
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in order of turns: the next caller first

    async def run(self, caller: str, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `job` on a thread; a cancelled caller waits for its end."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled at the very moment of its turn
                self._leave(caller)
            raise
        try:
            work = partial(job, *args, **kwargs)
            return await run_to_completion(asyncio.get_running_loop().run_in_executor(self._pool, work))
        finally:
            self._leave(caller)

    def _leave(self, caller: str) -> None:
        self._free += 1
        self._held -= Counter((caller,))  # without callers that hold none: their names come and go
        self._next()

    def _next(self) -> None:
        for caller, turns in list(self._waiting.items()):
            while turns and turns[0].cancelled():
                turns.popleft()
            if not turns:
                del self._waiting[caller]
            elif self._free and self._held[caller] < self._most:
                turns.popleft().set_result(None)
                self._free -= 1
                self._held[caller] += 1
                self._waiting[caller] = self._waiting.pop(caller)  # now the others come first
