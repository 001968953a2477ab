"""The command `bench idle`: processor time and wakes of servers that have nothing to do."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.commands import add_measurement
from onesweep.loadtest.report.record import check_report_options, origin, write_report
from onesweep.stages.settings import from_flags, setting

if TYPE_CHECKING:
    from onesweep.loadtest.workload.testbed import Testbed

AIM_PERCENT = 0.5  # of a core: a host that waits for work must not cost its owner anything
REQUEST = {"prompt": "The sea was calm.", "mode": "sweep", "max_bytes": 16, "seed": 0}


@dataclass(frozen=True)
class IdleSettings:
    """Settings of `bench idle`."""

    checkpoint: Path | None = setting(None, "bundle to serve", metavar="DIR", shown="the shipped weights")
    hosts: int | None = setting(None, "hosts that share the blocks", least=1, shown="3")
    settle_s: float = setting(15.0, "wait between the last request and the measurement", least=0)
    seconds: float = setting(20.0, "length of the measurement", metavar="S", above=0)


@dataclass(frozen=True)
class ProcessUsage:
    """Resources that a process has taken since its start."""

    processor_s: float
    wakes: int  # voluntary context switches: each ends a wait

    @classmethod
    def of(cls, process: Path) -> ProcessUsage:
        """ProcessUsage of all threads of the process with this folder under /proc. Raises OSError when it has ended."""
        # after the name, which may hold blanks and brackets, user and system time are words 12 and 13
        ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        processor_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return cls(processor_s, sum(_wakes(task) for task in (process / "task").iterdir()))


def _wakes(task: Path) -> int:
    for line in (task / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    return 0


@dataclass(frozen=True)
class IdleRow:
    """An idle process."""

    process: str
    processor_percent: float  # of one core
    wakes_per_s: float
    aim_percent: float = AIM_PERCENT


def measure_idle(settings: IdleSettings) -> list[IdleRow]:
    """A row for each host and the router of a deployment on loopback. Raises OnesweepError."""
    from onesweep.loadtest.workload.testbed import TestbedSettings, open_testbed

    with open_testbed(TestbedSettings(checkpoint=settings.checkpoint, hosts=settings.hosts)) as testbed:
        testbed.caller.ask([REQUEST])  # connections are open and kernels loaded, as after a day of work
        testbed.caller.close()
        time.sleep(settings.settle_s)
        return _rows(testbed, settings.seconds)


def _rows(testbed: Testbed, seconds: float) -> list[IdleRow]:
    assert testbed.deployment is not None
    processes = {name: Path("/proc") / str(pid) for name, pid in testbed.deployment.processes.items()}
    begin_s, before = time.monotonic(), {name: ProcessUsage.of(process) for name, process in processes.items()}
    time.sleep(seconds)
    took_s, after = time.monotonic() - begin_s, {name: ProcessUsage.of(process) for name, process in processes.items()}
    return [
        IdleRow(
            name,
            100 * (after[name].processor_s - before[name].processor_s) / took_s,
            (after[name].wakes - before[name].wakes) / took_s,
        )
        for name in processes
    ]


def idle_table(rows: list[IdleRow]) -> str:
    from onesweep.loadtest.report.table import Table, number_column, text_column

    table: Table[IdleRow] = Table(
        (
            text_column("process"),
            number_column("% of a core", "processor_percent", 2),
            ("aim %", lambda row: f"{row.aim_percent:g}"),
            ("within", lambda row: "yes" if row.processor_percent <= row.aim_percent else "no"),
            number_column("wakes/s", "wakes_per_s"),
        )
    )
    return table.aligned(rows)


add_idle = partial(add_measurement, settings=IdleSettings)


def run_idle(options: argparse.Namespace) -> int:
    from onesweep.stages.signals import ends_cleanly

    settings = from_flags(IdleSettings, options)
    check_report_options(options)
    print(f"{settings.seconds:g} s without requests, {settings.settle_s:g} s after the last one ...", flush=True)
    with ends_cleanly():
        rows = measure_idle(settings)
    print(idle_table(rows))
    record: dict[str, Any] = {"bench": "idle", **origin(), "seconds": settings.seconds}
    write_report(options, record | {"rows": [asdict(row) for row in rows]})
    return 0
