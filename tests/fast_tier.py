"""The rule of the fast tier: a test without the mark `slow` kills nothing and does not sleep.

Such a test passes on any machine, however busy it is. How long one takes is no part of the rule: even its processor
time doubles where others share a core. `--durations` shows it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = str(Path(__file__).parent)
FATAL = {signal.SIGKILL, signal.SIGSTOP}
# Fixtures that need rights, programs or a kernel that a machine may lack.
OF_THE_MACHINE = {"chromium", "etcd_with", "needs_lab", "small_disk"}
MAX_SLEEP_S = 0.05

_broken: list[str] = []
_kill, _killpg, _sleep, _sleep_async = os.kill, os.killpg, time.sleep, asyncio.sleep


def _is_of_a_test() -> bool:
    """True where a test's own code asked for it: the product may end processes of its own, and wait in its threads."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename == subprocess.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(TESTS)


def _note_kill(number: int) -> None:
    if number in FATAL and _is_of_a_test():
        _broken.append(f"sends {signal.Signals(number).name}")


def _note_sleep(seconds: float) -> None:
    if seconds > MAX_SLEEP_S and _is_of_a_test():
        _broken.append(f"sleeps for {seconds:g} s: wait for a state, or give the code a clock")


def _noted_kill(process: int, number: int) -> None:
    _note_kill(number)
    _kill(process, number)


def _noted_killpg(group: int, number: int) -> None:
    _note_kill(number)
    _killpg(group, number)


def _noted_sleep(seconds: float) -> None:
    _note_sleep(seconds)
    _sleep(seconds)


def _noted_sleep_async(delay: float, *arguments: Any) -> Any:
    _note_sleep(delay)
    return _sleep_async(delay, *arguments)


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and OF_THE_MACHINE.intersection(item.fixturenames):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a fast test that breaks the rule."""
    if item.get_closest_marker("slow"):
        return (yield)
    _broken.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", _noted_kill)
        patch.setattr(os, "killpg", _noted_killpg)
        patch.setattr(time, "sleep", _noted_sleep)
        patch.setattr(asyncio, "sleep", _noted_sleep_async)
        yield
    if _broken:
        pytest.fail(f"a fast test {_broken[0]} (mark it `slow`, or mend it)", pytrace=False)
