"""Where requests are measured: one deployment, a client process beside its router, and the links between the hosts."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from loadtest.wan_bench.floor import Course
from serving.deployment import Deployment
from stages.errors import OnesweepError

CALLER = ["-P", "-m", "loadtest.wan_bench.caller"]
STOP_S = 5.0
TIMEOUT_S = 900.0
"""Longest wait for one answer; 256 bytes of `ar` round a ring of 3 x 150 ms take 115 s, many candidates of a large
model longer than that."""


class Caller:
    """The parent's end of a caller process."""

    def __init__(self, command: list[str]) -> None:
        # a session of its own: Ctrl-C is for the benchmark, which then ends this one
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def ask(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Make these calls at once; their answers, in order. Raises OnesweepError when the process has gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([{"timeout_s": TIMEOUT_S, **call} for call in calls]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise OnesweepError(f"the client process of the benchmark ended (exit code {self.process.wait()})")
        answers: list[dict[str, Any]] = json.loads(line)
        return answers

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=STOP_S)
            return
        self.process.kill()
        self.process.wait()


class Station:
    """A deployment under measurement. A process that ends is noticed, told of, and started again."""

    def __init__(self, profile: str, deployment: Deployment, caller: Caller, course: Course) -> None:
        self.profile, self.deployment, self.caller, self.course = profile, deployment, caller, course
        self.given_up = ""
        """Why this deployment can serve no more; empty while it can."""

    def mend(self) -> str:
        """Start what ended again. Returns what happened; empty when every process runs."""
        ended = self.deployment.ended()
        if not ended:
            return ""
        what = "; ".join(f"{name} ended ({words})" for name, words in ended.items())
        try:
            for name in ended:
                self.deployment.revive(name)
            self.deployment.wait_ready()
        except OnesweepError as error:
            self.given_up = f"{what}; not ready again: {error}"
            return self.given_up
        return f"{what}; started again"


@contextlib.contextmanager
def open_station(
    profile: str, deployment: Deployment, course: Course, place: Callable[[str, list[str]], list[str]] | None = None
) -> Iterator[Station]:
    """A station with a caller of its own. `place`: where processes run, as in `Deployment.start`."""
    command = [sys.executable, *CALLER, deployment.topology.router]
    caller = Caller(place("router", command) if place else command)
    try:
        yield Station(profile, deployment, caller, course)
    finally:
        caller.close()
