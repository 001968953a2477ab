"""An event loop whose time jumps to the next timer, and the processes simulated on it."""

from __future__ import annotations

import asyncio
import heapq
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple
from zlib import crc32

from stages import clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Call = Callable[..., object]

MAX_TURNS = 200_000  # a schedule takes two thousand
BEGIN_S = 1000.0  # start of virtual time, far from 0, which some code may take for "never"


class Killed(BaseException):
    """The process was killed in the middle of a disk write: not an error, and nothing may catch it."""


class Process:
    """A simulated process: everything that runs in its context. A halted process runs nothing, as after SIGSTOP; a
    killed one is halted for ever, without any cleanup."""

    def __init__(self, loop: VirtualLoop, place: str) -> None:
        """:param place: the machine; a later start there makes another process."""
        self.loop, self.place, self.begun_s = loop, place, loop.now_s
        # Its clock: no two read alike, and replicas' drift apart; the first measures least, so routers prefer it.
        self.ahead_s, self.rate = float(crc32(place.encode()) % 1000), 1 + ((ord(place[-1]) + 1) % 5 - 2) / 500
        self.halted = self.killed = False
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        loop.processes.append(self)
        self.parked: list[_Handle] = []  # calls that came due while it was halted

    def start(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.loop.create_task(job, context=self.context)

    def call_at(self, at_s: float, call: Call, *arguments: Any) -> _Handle:  # noqa: ANN401
        return self.loop.push(at_s, call, arguments, self.context)

    def jump(self, by_s: float) -> None:
        """Make its clock jump ahead, as on a migrated machine: timers fire sooner."""
        self.ahead_s += by_s
        for i, (at_s, number, timer) in enumerate(self.loop._timers):
            if timer.is_by_clock and timer._context.get(PROCESS) is self:
                self.loop._timers[i] = at_s - by_s / self.rate, number, timer
        heapq.heapify(self.loop._timers)

    def resume(self) -> None:
        """Run the calls that came due meanwhile, in order."""
        if not self.killed:
            self.halted = False
            self.loop._ready.extend(self.parked)
            self.parked = []


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)

# Name of the machine whose call a task serves.
CALLER: ContextVar[str] = ContextVar("caller", default="")


def here() -> Process:
    """The process that runs now."""
    process = PROCESS.get()
    assert process is not None, "nothing simulated runs"
    return process


class _Handle(asyncio.TimerHandle):
    """A scheduled call without debugging aids, because a schedule makes ten thousand of them."""

    __slots__ = ("is_by_clock",)  # True: due by a process's clock, not by the world's
    _source_traceback = None

    def __init__(self, call: Any, arguments: Any, context: Context) -> None:  # noqa: ANN401
        self._callback, self._args, self._context = call, arguments, context
        self._cancelled = self.is_by_clock = False

    def cancel(self) -> None:
        self._cancelled, self._callback, self._args = True, None, ()


class VirtualLoop(asyncio.BaseEventLoop):
    """A deterministic loop: nothing waits or runs on another thread, and the same calls run in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.turns = BEGIN_S, 0
        self.processes: list[Process] = []
        self.problems: list[str] = []  # unhandled exceptions
        self.set_exception_handler(lambda _, at: self.problems.append(f"{at.get('message')}: {at.get('exception')!r}"))
        # Kept so that the collector does not clean up what a killed process waited for.
        self.tasks: list[asyncio.Task[Any]] = []
        self._ready: Any
        self._timers: list[tuple[float, int, _Handle]] = []  # those of one moment in order
        self._calls = 0

    def time(self) -> float:
        process = PROCESS.get()
        return self.now_s if process is None else process.ahead_s + process.rate * self.now_s

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> _Handle:
        """Schedule a call by the running process's clock."""
        process, context = PROCESS.get(), copy_context() if context is None else context
        if process is None:
            return self.push(when, callback, args, context)
        timer = self.push((when - process.ahead_s) / process.rate, callback, args, context)
        timer.is_by_clock = True
        return timer

    def push(self, when: float, call: Call, arguments: tuple[Any, ...], context: Context) -> _Handle:
        """Schedule a call by the world's clock."""
        self._calls, timer = self._calls + 1, _Handle(call, arguments, context)
        heapq.heappush(self._timers, (when, self._calls, timer))
        return timer

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> _Handle:
        self._ready.append(handle := _Handle(callback, args, copy_context() if context is None else context))
        return handle

    def create_task(self, coro: Any, **how: Any) -> asyncio.Task[Any]:  # noqa: ANN401
        task: asyncio.Task[Any] = super().create_task(coro, **how)
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it at once: computation takes the virtual time that its owner accounts for."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """Run everything due, in the order in which it became due; if nothing is, jump to the next timer."""
        ready, timers, self.turns = self._ready, self._timers, self.turns + 1
        if self.turns > MAX_TURNS:
            raise RuntimeError("the simulation makes no progress")
        if not ready:
            if not timers:
                raise RuntimeError("the simulation is deadlocked: no event is left")
            self.now_s = max(self.now_s, timers[0][0])
        while timers and timers[0][0] <= self.now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.halted:
                process.parked.append(handle)
                continue
            try:  # as `handle._run()` does
                handle._context.run(handle._callback, *handle._args)
            except Killed:
                pass
            except Exception as error:
                self.call_exception_handler({"message": f"Exception in {handle._callback}", "exception": error})

    def close(self) -> None:
        """Release the rest at once: the collector would take as long again to find it."""
        super().close()
        for left in (self._timers, self._ready, self.tasks, self.processes):
            left.clear()

    def _write_to_self(self) -> None:
        """Do nothing, since no other thread uses this loop."""


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop with a virtual clock during a `with` block, at whose end running tasks are cancelled."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    with clock.replaced(loop.time):
        try:
            yield loop
        finally:
            loop.turns = 0
            for process in loop.processes:
                process.killed = False
                process.resume()
            while tasks := [task for task in loop.tasks if not task.done()]:
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Log only errors in the block, into the list: a schedule's faults cause none."""
    said, root, level = list[str](), logging.getLogger(), logging.root.manager.disable
    errors = logging.Handler(logging.ERROR)
    errors.emit = lambda record: said.append(f"{record.getMessage()} {record.exc_info or ''}")  # type: ignore[method-assign]
    errors.addFilter(lambda record: not re.search("free some space|faulty", record.getMessage()))  # the faults'
    root.addHandler(errors)
    logging.disable(logging.WARNING)
    try:
        yield said
    finally:
        logging.disable(level)
        root.removeHandler(errors)
