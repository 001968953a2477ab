"""The machine, and the code, that a figure was measured with: without them it means little."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GIT_S = 10.0


@dataclass(frozen=True)
class Machine:
    """What a reader needs to place a figure."""

    processor: str
    cores: int
    system: str
    python: str
    torch: str
    grpcio: str
    onnxruntime: str | None
    load_average: float
    """Of the minute before the run: others who were busy here."""

    @property
    def sentence(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {self.system}, Python {self.python}, torch {self.torch}, "
            f"grpcio {self.grpcio}, load average {self.load_average:.1f} before the run"
        )


def this_machine() -> Machine:
    return Machine(
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


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[1]
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
