"""The results of a bench: a table, and a record with the command, code and machine of the measurement."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.device import all_cores, processor
from stages.errors import InputError, one_of
from stages.progress import aligned

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    unit: str
    at_most: float | None = None  # None without a target; a difference of times may exceed it by its last digit

    @property
    def cells(self) -> tuple[str, ...]:
        value = f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.3g}"
        if (most := self.at_most) is None:
            return self.name, value, self.unit, "", ""
        return self.name, value, self.unit, f"{most:g}", "yes" if self.value - most < 1e-9 else "no"


@dataclass(frozen=True)
class BenchReport:
    table: str  # for the terminal
    record: dict[str, Any]  # for a JSON file
    passed: bool = True  # False if something happened that must not: sets the exit code

    @classmethod
    def of_rows(cls, settings: DataclassInstance, rows: Sequence[Row]) -> BenchReport:
        cells = [("figure", "value", "unit", "at most", "met"), *(row.cells for row in rows)]
        record = {"settings": settings_record(settings), "rows": list(map(asdict, rows))}
        return cls("\n".join(aligned(cells, ruled=True)), record)


def echo(text: str) -> None:
    """Print a line at once, even into a pipe."""
    print(text, flush=True)


MAX_SEED = (1 << 63) - 1  # half of a request's range, because seeds count up from the first one


def check_names(flag: str, given: Sequence[str], known: Collection[str] | None = None) -> None:
    """Raise InputError for an unknown or repeated name; without `known`, any name is allowed."""
    for name in given:
        if known is not None and name not in known:
            raise InputError(f"{flag}: unknown value {name!r}{one_of(name, known)}")
        if given.count(name) > 1:
            raise InputError(f"{flag} lists {name!r} twice")


# A run's record as JSON values.

GIT_S = 10.0  # a folder on a slow network must not hold up a record


def origin() -> dict[str, Any]:
    """The head of every record: command, commit and machine."""
    return {"command": shlex.join(["onesweep", *sys.argv[1:]]), "commit": commit(), "machine": machine()}


def machine() -> dict[str, Any]:
    """The machine of a run, without which a result means little."""
    return {
        "processor": processor(),
        "cores": all_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
        "load_average": round(os.getloadavg()[0], 2),  # over the last minute: on a busy machine latencies say little
    }


def commit() -> str:
    """The commit of the running code, with `+changes` if files differ from it; `unknown` outside a checkout."""
    words = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]  # without names of tags
    command = ["git", "-C", str(Path(__file__).parents[1]), "--git-dir=.git", *words]  # not of a folder above
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=GIT_S).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def settings_record(settings: DataclassInstance, **changes: object) -> dict[str, Any]:
    """JSON values of every setting; `changes` override values that differ from those given, or add further names."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()} | changes
