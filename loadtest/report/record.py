"""The record of a run as JSON: the figures, and the command, code and machine that they were measured with."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GIT_S = 10.0  # a folder on a slow network must not hold up a record


def origin() -> dict[str, Any]:
    """The head of every record: command, commit and machine."""
    return {"command": shlex.join(["onesweep", *sys.argv[1:]]), "commit": commit(), "machine": machine()}


def machine() -> dict[str, Any]:
    """The machine of a run: without it a figure means little."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
        "load_average": round(os.getloadavg()[0], 2),  # of the minute before: on a busy machine latencies say little
    }


def commit() -> str:
    """The commit of the code that runs, `+changes` where files differ from it; `unknown` outside a checkout."""
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    if head is None:
        return "unknown"
    return head + ("+changes" if changes else "")


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
