"""The command line in processes of its own, forked from a server that has imported torch once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from stages.errors import OnesweepError
from trainer.rounds.processes import PRELOADED


def launched(log: Path, *arguments: object) -> BaseProcess:
    """`onesweep ARGUMENTS`, whose words go into a file."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    process = processes.Process(target=_run, args=(log, [*map(str, arguments), "--threads", "1"]))
    process.start()
    return process


def ended(process: BaseProcess, within_s: float) -> int | None:
    """Its exit code; None where it has not come to its end."""
    process.join(within_s)
    return process.exitcode


def _run(log: Path, arguments: list[str]) -> None:
    import argparse

    from trainer.commands import register

    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    options = parser.parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except OnesweepError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
