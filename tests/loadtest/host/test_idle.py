"""Idle servers: what is read of a process, and a whole run."""

import json
import os
from pathlib import Path

from onesweep.loadtest.host.idle import IdleRow, ProcessUsage, idle_table
from onesweep.serving.cli.__main__ import main


def test_times_and_wakes_of_all_threads_are_added(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"7 (a (b) c) S {' '.join('0' * 10)} {2 * ticks} {ticks} 0 0")
    for thread, wakes in (("7", 3), ("8", 4)):
        (tmp_path / "task" / thread).mkdir(parents=True)
        status = f"Name:\tx\nvoluntary_ctxt_switches:\t{wakes}\nnonvoluntary_ctxt_switches:\t9\n"
        (tmp_path / "task" / thread / "status").write_text(status)
    assert ProcessUsage.of(tmp_path) == ProcessUsage(3.0, 7)


def test_the_table_has_the_aim_beside_each_process() -> None:
    lines = idle_table([IdleRow("host-1", 0.42, 11.0), IdleRow("router", 0.61, 30.5)]).splitlines()
    assert lines[2].split() == ["host-1", "0.42", "0.5", "yes", "11.0"]
    assert lines[3].split() == ["router", "0.61", "0.5", "no", "30.5"]


def test_a_whole_run(bundle: Path, tmp_path: Path) -> None:
    record = tmp_path / "idle.json"
    options = ["--checkpoint", str(bundle), "--settle-s", "0", "--seconds", "1", "--json", str(record)]
    assert main(["bench", "idle", *options]) == 0
    rows = {row["process"]: row for row in json.loads(record.read_text())["rows"]}
    assert set(rows) == {"host-1", "host-2", "router"}
    assert all(row["processor_percent"] >= 0 and row["wakes_per_s"] > 0 for row in rows.values())
