"""Progress of long work: a line that is rewritten on a terminal, or a new line every few seconds anywhere else."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TextIO

TERMINAL_PAUSE_S, PAUSE_S, TICK_S = 0.1, 3.0, 1.0
# Below this share and time, the time left would be a guess.
MIN_SHARE, MIN_S = 0.03, 1.0
CLEAR = "\r\x1b[K"


def aligned(rows: Sequence[Sequence[str]], ruled: bool = False) -> list[str]:
    """Lines of a table for a terminal; a row with fewer cells than the first shows a message in place of numbers.

    :param ruled: align numbers to the right, and draw a line below the head.
    """
    widths = [max(map(len, column)) for column in zip(*(r for r in rows if len(r) == len(rows[0])), strict=True)]
    if ruled:
        rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    side = str.rjust if ruled else str.ljust
    return ["  ".join([row[0].ljust(widths[0]), *map(side, row[1:], widths[1:])]).rstrip() for row in rows]


def counted(count: int, noun: str) -> str:
    """A count with its noun, such as "1 round" and "2 rounds"."""
    return f"{count} {noun}{'s' * (count != 1)}"


class ProgressLine:
    """Shows the progress of some work on a stream."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """:param stream: by default standard error, which leaves standard output to results."""
        self._stream, self._clock = stream or sys.stderr, clock
        self.in_place, self._shown, self._step = self._stream.isatty() and os.environ.get("TERM") != "dumb", "", ""
        self._begin, self._last, self._what, self._pause_s = clock(), -float("inf"), "", PAUSE_S

    def say(self, line: str) -> None:
        """Show a permanent line."""
        self.close()
        print(f"{line}\n", end="", file=self._stream, flush=True)  # one call per line, as several threads may print

    def at(self, what: str, share: float | None = None) -> None:
        """Report that `what` is being done now, and `share` of all the work, from 0 to 1, is done. None: unknown."""
        now, step = self._clock(), what.partition(":")[0]  # the part after the colon tells how far the step is
        # waiting before the work does not predict the time left, nor does one step predict the next
        if share == 0.0 or (share is None and step != self._step):
            self._begin = now
        self._step = step
        if what != self._what or share is not None:
            self._pause_s = PAUSE_S
        if now - self._last < (TERMINAL_PAUSE_S if self.in_place else self._pause_s):
            return
        self._last, self._what, self._pause_s = now, what, 2 * self._pause_s  # a repeated message is less and less news
        line = what + self._numbers(now - self._begin, share)
        if self.in_place:
            # a wrapped line cannot be erased
            print(CLEAR + line[: shutil.get_terminal_size().columns - 1], end="", file=self._stream, flush=True)
        elif line != self._shown:
            print(line, file=self._stream, flush=True)
        self._shown = line

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.in_place and self._shown:
            print(CLEAR, end="", file=self._stream, flush=True)
        self._shown = ""

    def _numbers(self, took_s: float, share: float | None) -> str:
        if share is None:
            return f" ({took_s:.0f} s)" if took_s >= MIN_S else ""
        if share < MIN_SHARE or took_s < MIN_S:
            return f", {share:.0%} done"
        return f", {share:.0%} done, about {took_s * (1 - share) / share:.0f} s left"


@contextmanager
def ticking(what: str) -> Iterator[None]:
    """Show during a `with` block that `what` is being done, unless the block is short."""
    done = threading.Event()
    with closing(ProgressLine()) as progress:

        def tick() -> None:
            while not done.wait(TICK_S):
                progress.at(what)

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
