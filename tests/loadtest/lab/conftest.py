"""Labs for tests, and programs of plain sockets that run in them."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.lab.lab import Lab, temporary_lab
from loadtest.lab.profile import Link, Profile

PLAIN_SOCKETS = Path(__file__).with_name("plain_sockets.py")
ATTEMPTS = 30  # so many only where a machine is busy for a quarter of a minute


@pytest.fixture
def lab_of(needs_lab: None) -> Iterator[Callable[..., Lab]]:
    """`lab_of(Link(...), hosts)`: a lab of one kind of link, or of a whole profile."""
    with contextlib.ExitStack() as stack:

        def make(links: Link | Profile, hosts: int = 1) -> Lab:
            profile = links if isinstance(links, Profile) else Profile("test", links)
            return stack.enter_context(temporary_lab(profile, hosts))

        yield make


class Programs:
    """Starts `plain_sockets.py` in nodes, and ends what still runs."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def start(self, lab: Lab, node: str, *arguments: object, ready: bool = False) -> subprocess.Popen[str]:
        argv = [sys.executable, "-I", str(PLAIN_SOCKETS), *map(str, arguments)]
        process = subprocess.Popen(lab.command(node, argv), stdout=subprocess.PIPE, text=True)
        self.running.append(process)
        if ready:
            assert process.stdout.readline() == "ready\n"
        return process

    def result(self, process: subprocess.Popen[str]) -> Any:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return json.loads(output)

    def run(self, lab: Lab, node: str, *arguments: object) -> Any:
        return self.result(self.start(lab, node, *arguments))

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()
        self.running.clear()


@pytest.fixture
def programs() -> Iterator[Programs]:
    started = Programs()
    try:
        yield started
    finally:
        started.end()


def settles(measure: Callable[[], float], bounds: tuple[float, float]) -> None:
    """Check that some measurement lies between. Others use this machine, too, so one that was
    disturbed is made again; the bounds stay."""
    seen: list[float] = []
    for _ in range(ATTEMPTS):
        seen.append(measure())
        if bounds[0] <= seen[-1] <= bounds[1]:
            return
        time.sleep(0.5)
    raise AssertionError(f"none of {seen} lies in {bounds}")
