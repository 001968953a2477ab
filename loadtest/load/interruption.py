"""Signals that end a command: Ctrl-C, a plain `kill`, a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def on_signal(act: Callable[[], None]) -> Iterator[None]:
    """Any of the signals calls `act` while the `with` block runs; outside the main thread nothing changes.

    Ctrl-C is set too, because a command that a script starts in the background inherits it ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: act()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
