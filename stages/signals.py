"""The process: signals that end it, and their handlers; its file descriptors; and its start time."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from stages.clock import monotonic

T = TypeVar("T")

log = logging.getLogger(__name__)
POLL_S = 0.02
STOP_REQUESTED = "stop requested by"  # in a server's log, before the name of the signal

# Tells a server that its standard input is a pipe from its parent: it ends with the parent, even a killed one.
LIFELINE_VARIABLE = "ONESWEEP_LIFELINE"

# Ctrl-C, a plain `kill`, a closed terminal. Ctrl-C is set too, as a command that a script starts in the background
# inherits it as ignored.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """A plain `kill` or a closed terminal: ends even work that may survive Ctrl-C."""


@contextlib.contextmanager
def on_signal(act: Callable[[int], object]) -> Iterator[None]:
    """Within a `with` block, any of the signals calls `act` with its number; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, _: act(number)) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int) -> NoReturn:
    raise (KeyboardInterrupt if number == signal.SIGINT else Terminated)


# Makes any of the signals end a `with` block as Ctrl-C does: a command's servers must not outlive it.
ends_cleanly = partial(on_signal, _interrupt)
# Makes any of the signals end the process in a `with` block: an exception may crash torch's import, or get lost there.
ends_at_once = partial(on_signal, lambda number: os._exit(128 + number))


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer signals that arrive in a `with` block to its end."""
    numbers = list[int]()
    try:
        with on_signal(numbers.append):
            yield
    finally:
        for number in numbers[:1]:
            signal.raise_signal(number)


def ask_to_stop(stop: threading.Event, number: int) -> None:
    """Set it, for work that ends at a good moment; a second signal does not wait. For `on_signal`."""
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; any of the signals cancels it at its next await.

    Then raises KeyboardInterrupt for Ctrl-C, Terminated for other signals."""
    # A handler must not raise: it could do so anywhere, and an exception crashes gRPC's start, which is in C.
    interrupted = 0  # number of the signal
    cancel: Callable[[], object] | None = None

    def interrupt(number: int) -> None:
        nonlocal interrupted
        interrupted = number
        if cancel is not None:
            cancel()

    async def run() -> T:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel = partial(loop.call_soon_threadsafe, task.cancel)  # wakes the loop
        if threading.current_thread() is threading.main_thread():
            # Handled by the loop: Python's own handlers wait for the next bytecode, so a signal between the last one
            # and the loop's wait in the kernel would take effect only at the request's deadline.
            for number in ENDING_SIGNALS:
                loop.add_signal_handler(number, interrupt, number)
        if interrupted:  # before the loop existed: the work ends at its first await
            task.cancel()
        return await work

    with on_signal(interrupt), contextlib.suppress(asyncio.CancelledError):
        result = asyncio.run(run())
        if not interrupted:  # else the signal came after the work's end, but before the loop's
            return result
    _interrupt(interrupted or signal.SIGINT)


def run_until_signal(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a server with an event from `stop_on_signals` to its end. Raises the server's exceptions.

    Ends the process if a thread is left, such as one that reads weights: nothing can interrupt it."""

    async def until_signal() -> None:
        gc.freeze()  # imported objects stay: collecting over them would stall requests, and the exit
        await serve(stop_on_signals())

    raise_descriptor_limit()
    asyncio.run(until_signal())
    if threading.active_count() > 1:  # Python would wait for the thread, 20 s for a stage of two gigabytes
        os._exit(0)


async def drained(is_busy: Callable[[], object], within_s: float) -> None:
    """Return once a server has nothing under way, or after `within_s`."""
    deadline = monotonic() + within_s
    while is_busy() and monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets, with a log line. A second signal, or the end of the lifeline, ends the
    process at once. Main thread only."""
    stop, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def begin_to_stop(by: str) -> None:
        log.info("%s %s", STOP_REQUESTED, by)
        stop.set()
        loop.remove_reader(0)
        for number in numbers:
            loop.remove_signal_handler(number)
            # the kernel has no default action for process 1, as in a container
            signal.signal(number, (lambda n, _: os._exit(128 + n)) if os.getpid() == 1 else signal.SIG_DFL)

    def end() -> None:  # the parent held the links to the machines: nothing under way could finish
        begin_to_stop("the end of its parent process")
        signal.raise_signal(signal.SIGTERM)

    for number in numbers:
        loop.add_signal_handler(number, begin_to_stop, number.name)
    if os.environ.get(LIFELINE_VARIABLE):
        loop.add_reader(0, end)
    return stop


def start_ticks(pid: int) -> int:
    """The start time of a process, which with its ID identifies it for good; 0 if it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(others[18])


# File descriptors: as many as the machine allows, and few log lines if they run out.

# Reserved for descriptors other than clients' connections: links to the router, files, name servers.
RESERVED = 16
LOG_INTERVAL_S = 60.0
# Libraries log these for every connection that they have no room for, or cannot read.
_REPEATED = ("socket.accept() out of system resource", "Exceeded concurrency limit", "Invalid HTTP request received")


class _RateLimitFilter(logging.Filter):
    """Passes each of those sentences once in LOG_INTERVAL_S, without its traceback."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock, self.logged_at = clock, dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        sentence = next((each for each in _REPEATED if str(record.msg).startswith(each)), None)
        if sentence is None:
            return True
        if (now := self.clock()) - self.logged_at.get(sentence, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        self.logged_at[sentence] = now
        record.msg, record.args, record.exc_info = f"{sentence} (logged at most once a minute)", (), None
        return True


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(_RateLimitFilter())


def descriptor_limit() -> int:
    """Most files and connections that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def free_descriptors() -> int:
    """Connections that the limit leaves to clients, after the open descriptors and RESERVED."""
    return descriptor_limit() - psutil.Process().num_fds() - RESERVED
