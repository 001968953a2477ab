"""The load generator as the parent sees it: a process beside the router, its messages, its end."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import IO

from loadtest.load.plan import LoadPlan, LoadSample, Window, from_line
from loadtest.workload.testbed import Testbed
from stages.errors import InputError, ServiceError
from stages.signals import on_signal

END_S = 20.0  # how long the generator may take to end once it was told to


@dataclass
class Recording:
    """Every request of a run, and which part of it is measured."""

    samples: list[LoadSample] = field(default_factory=list)
    window: Window | None = None


class Generator:
    """A running load generator."""

    def __init__(self, process: subprocess.Popen[str], words: IO[str]) -> None:
        self._process, self._words = process, words
        self.recording = Recording()
        self.stopped = False

    def drain(self) -> Recording:
        """Read until the users have stopped and the generator has ended. Raises ServiceError when it failed."""
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            match from_line(line):
                case LoadSample() as sample:
                    self.recording.samples.append(sample)
                case Window() as window:
                    self.recording.window = replace(window, interrupted=window.interrupted or self.stopped)
        code = self._process.wait()
        if code == 0:
            return self.recording
        self._words.seek(0)
        last = self._words.read().strip().splitlines()[-1:] or ["it said nothing"]
        raise ServiceError(f"the load generator ended (exit code {code}): {last[0]}")

    def stop(self) -> None:
        """Tell it to end: its requests have a moment left."""
        self.stopped = True
        stdin, self._process.stdin = self._process.stdin, None
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def hurry(self) -> None:
        """Handle Ctrl-C: stop, and interrupt at the second time."""
        if self.stopped:
            raise KeyboardInterrupt
        self.stop()


@contextlib.contextmanager
def start_generator(target: Testbed, plan: LoadPlan) -> Iterator[Generator]:
    """A load generator beside the router; it ends with the `with` block, whatever happens.

    In the block Ctrl-C only stops the users, so that what they did can still be counted; a second one interrupts.
    """
    command = target.beside([sys.executable, "-P", "-m", "loadtest.load.worker"])
    with tempfile.TemporaryFile("w+", prefix="onesweep-load-") as words:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which then says when to stop
        )
        assert process.stdin is not None
        generator = Generator(process, words)
        try:
            with contextlib.suppress(BrokenPipeError):  # its end says more than this
                process.stdin.write(plan.to_json() + "\n")
                process.stdin.flush()
            with on_signal(generator.hurry):  # an exception in the middle of a line would lose a request
                yield generator
        finally:
            generator.stop()
            _end(process)


def check_locust() -> None:
    """Raises InputError with what to install."""
    for module in ("locust", "gevent"):
        if find_spec(module) is None:
            raise InputError(f"the load test needs {module}: pip install 'onesweep[loadtest]'")


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=END_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    process.stdout.close()
