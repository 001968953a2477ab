"""The load generator as the parent sees it: a process beside the router, its messages, its end."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import IO, Self

from loadtest.lab.child import Child, from_line
from loadtest.load.plan import KINDS, LoadPlan, LoadSample, Window
from loadtest.workload.testbed import Testbed
from stages.errors import InputError, ServiceError
from stages.signals import on_signal

END_S = 20.0  # how long the generator may take to end once it was told to


class Generator(Child):
    """A running load generator: every request of its users, and which part of the run is measured."""

    def __init__(self, command: list[str], plan: LoadPlan, words: IO[str]) -> None:
        super().__init__(command, asdict(plan), words)
        self._words, self.stopped = words, False
        self.samples = list[LoadSample]()
        self.window: Window | None = None

    def drain(self) -> Self:
        """Read until the users have stopped and the generator has ended. Raises ServiceError when it failed."""
        for line in self.lines():
            match from_line(line, KINDS):
                case LoadSample() as sample:
                    self.samples.append(sample)
                case Window() as window:
                    self.window = replace(window, interrupted=window.interrupted or self.stopped)
        code = self.process.wait()
        if code == 0:
            return self
        self._words.seek(0)
        last = self._words.read().strip().splitlines()[-1:] or ["it said nothing"]
        raise ServiceError(f"the load generator ended (exit code {code}): {last[0]}")

    def hurry(self) -> None:
        """Handle Ctrl-C: stop, and interrupt at the second time."""
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        self.stop()


@contextlib.contextmanager
def start_generator(target: Testbed, plan: LoadPlan) -> Iterator[Generator]:
    """A load generator beside the router; it ends with the `with` block, whatever happens.

    In the block Ctrl-C only stops the users, so that what they did can still be counted; a second one interrupts.
    """
    command = target.beside([sys.executable, "-P", "-m", "loadtest.load.worker"])
    with tempfile.TemporaryFile("w+", prefix="onesweep-load-") as words:
        generator = Generator(command, plan, words)
        try:
            with on_signal(generator.hurry):  # an exception in the middle of a line would lose a request
                yield generator
        finally:
            generator.end(END_S)


def check_locust() -> None:
    """Raises InputError with what to install."""
    for module in ("locust", "gevent"):
        if find_spec(module) is None:
            raise InputError(f"the load test needs {module}: pip install 'onesweep[loadtest]'")
