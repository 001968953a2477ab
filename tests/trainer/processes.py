"""Processes forked from a server that has imported torch once for all of them, and the command line in them."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from serving.cli.__main__ import main

# torch takes seconds to import, and so does `torch._dynamo`, which every process would import with its first optimizer
PRELOADED = ["trainer.rounds.worker", "torch._dynamo"]


def launched(log: Path, *arguments: object) -> BaseProcess:
    """`onesweep ARGUMENTS`, whose words go into a file."""
    return forked(log, log, main, [*map(str, arguments), "--threads", "1"])


def forked(out: Path, errors: Path, job: Callable[..., int], *arguments: object) -> BaseProcess:
    """A process that ends with what `job(*arguments)` returns."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    process = processes.Process(target=_run, args=(out, errors, job, arguments))
    process.start()
    return process


def ended(process: BaseProcess, within_s: float) -> int | None:
    """Its exit code; None where it has not come to its end."""
    process.join(within_s)
    return process.exitcode


def _run(out: Path, errors: Path, job: Callable[..., int], arguments: tuple[object, ...]) -> None:
    for path, stream in ((out, sys.stdout), (errors, sys.stderr)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.exit(job(*arguments))
