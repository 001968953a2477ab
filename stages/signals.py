"""Signals that end a command: what they call, and what they interrupt."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

# Ctrl-C, a plain `kill`, a closed terminal. Ctrl-C is set too, because a command that a script starts in the background
# inherits it ignored.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def on_signal(act: Callable[[], object]) -> Iterator[None]:
    """Any of the signals calls `act` while the `with` block runs; outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: act()) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ends_cleanly() -> contextlib.AbstractContextManager[None]:
    """Has any of the signals end a `with` block as Ctrl-C does: servers of a command must not outlive it."""
    return on_signal(_interrupt)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; any of the signals cancels it where it waits. Raises KeyboardInterrupt then."""
    # A handler that raises does so anywhere, and gRPC's start, in C, crashes when it is left by an exception.
    interrupted = False
    cancel: Callable[[], object] | None = None

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        if cancel is not None:
            cancel()

    async def run() -> T:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel = partial(loop.call_soon_threadsafe, task.cancel)  # which wakes the loop
        if interrupted:  # before there was a loop: the work ends where it first waits
            task.cancel()
        return await work

    with on_signal(interrupt):
        try:
            return asyncio.run(run())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once. Main thread only."""
    stop, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def begin_to_stop() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, begin_to_stop)
    return stop
