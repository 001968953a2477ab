"""The machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What a reader needs to place a figure."""

    processor: str
    cores: int
    system: str
    python: str
    torch: str
    grpcio: str
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
        load_average=os.getloadavg()[0],
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
