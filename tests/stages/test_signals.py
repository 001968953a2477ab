"""Signals that end a command, sent to this process and to others."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from stages.signals import ENDING_SIGNALS, ends_cleanly, run_interruptible

pytestmark = pytest.mark.slow

STOPPING = """
import asyncio
from stages.signals import stop_on_signals

async def main():
    stop = stop_on_signals()
    print("up", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_at_once(second: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(second)
        assert process.wait(60) == -second


def test_a_server_does_not_wait_for_a_thread() -> None:
    program = """
import threading, time
from stages.signals import run_until_signal

async def serve(stop):
    threading.Thread(target=time.sleep, args=[600]).start()
    print("up", flush=True)
    await stop.wait()

run_until_signal(serve)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_interrupts_a_block_and_its_handler_is_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ends_cleanly():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_work_is_cancelled_at_its_next_wait(number: signal.Signals) -> None:
    """Not at the signal itself: gRPC's start, left by an exception, is a crash."""
    steps: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            steps.append("went on")
            await asyncio.sleep(600)
        finally:
            steps.append("cleaned up")

    with ends_cleanly(), pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
    assert steps == ["went on", "cleaned up"]


def test_a_signal_during_imports_ends_the_process_without_a_traceback() -> None:
    program = (
        "import signal; from stages.signals import ends_at_once as e\nwith e(): signal.raise_signal(signal.SIGINT)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_a_signal_before_the_work_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make = asyncio.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        os.kill(os.getpid(), signal.SIGINT)
        return make()

    monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(asyncio.sleep(600))


def test_a_signal_after_the_work_is_not_lost() -> None:
    async def left() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)

    async def work() -> None:
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(0)

    tasks = list[asyncio.Task[None]]()
    with ends_cleanly(), pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
