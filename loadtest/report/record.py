"""The record of a run as JSON: the figures, and the command, code and machine that they were measured with."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onesweep.stages.settings import check_destination, write_destination

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GIT_S = 10.0  # a folder on a slow network must not hold up a record


@dataclass(frozen=True)
class MachineFacts:
    """The machine of a run: without it a figure means little."""

    processor: str
    cores: int
    system: str
    python: str
    torch: str
    grpcio: str
    onnxruntime: str | None
    load_average: float  # of the minute before the run: on a busy machine latencies say little


def origin(command: str = "", seed: int | None = None) -> dict[str, Any]:
    """The head of every record: command, commit, machine, and the seed where there is one.

    :param command: empty = the command line of this process.
    """
    head = {"command": command or this_command(), "commit": commit(), "machine": asdict(this_machine())}
    return head if seed is None else head | {"seed": seed}


def this_command() -> str:
    return shlex.join(["onesweep", *sys.argv[1:]])


def this_machine() -> MachineFacts:
    return MachineFacts(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version("torch"),
        grpcio=version("grpcio"),
        onnxruntime=_version("onnxruntime"),
        load_average=round(os.getloadavg()[0], 2),
    )


def commit() -> str:
    """The commit of the code that runs, `+changes` where files differ from it; `unknown` outside a checkout."""
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    if head is None:
        return "unknown"
    return head + ("+changes" if changes else "")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def check_report_options(options: argparse.Namespace) -> None:
    """Raises InputError, before anything is measured, for a file that could not be written afterwards."""
    if options.json:
        check_destination(options.json, "--json")


def write_report(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the file of `--json`. Raises OnesweepError when the disk is full or the folder has gone meanwhile."""
    if options.json:
        write_destination(options.json, json.dumps(record, indent=2) + "\n")


def settings_record(settings: DataclassInstance, **changes: object) -> dict[str, Any]:
    """JSON values of every setting; `changes` stand for what is not as it was given, or has a name of its own."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()} | changes


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
