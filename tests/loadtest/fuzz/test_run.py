"""`onesweep fuzz` itself: a short run with real processes, and the watch that would tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtest.fuzz.findings import Tally
from loadtest.fuzz.watch import Watch
from serving.cli import main

pytest.importorskip("fastapi", reason="the extra `http` is not installed")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    targets = "stage,router,http"
    assert main(["fuzz", "--inputs", "300", "--seed", "7", "--targets", targets, "--json", str(path)]) == 0
    said, record = capsys.readouterr().out, json.loads(path.read_text())
    assert record["findings"] == []
    assert {target["target"]: target["inputs"] > 25 for target in record["targets"]} == {
        **dict.fromkeys(targets.split(","), True),
        "all": False,
    }
    assert record["inputs"] >= 300
    assert sum(record["healthy_right"].values()) >= 1
    assert set(record["rss_mb"]) == {"host-1", "host-2", "router", "http", "deceived"}
    assert "findings" in said


@pytest.mark.parametrize("flags", [["--inputs", "0"], ["--targets", "moon"], ["--json", "/nowhere/x.json"]])
def test_a_mistake_is_told_before_anything_starts(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", *flags]) == 2
    assert flags[1] in capsys.readouterr().err


@pytest.fixture
def watched(tmp_path: Path) -> Callable[[str, psutil.Process | None], Tally]:
    """What a watch finds where one process has such a log."""

    def look(log: str, process: psutil.Process | None) -> Tally:
        path, tally = tmp_path / "host.log", Tally("stage")
        path.write_text(log)
        scene: Any = SimpleNamespace(processes=lambda: {"host": process}, log=lambda name: path)
        Watch(scene).look(tally)
        return tally

    return look


def test_the_watch_sees_tracebacks_and_ends(watched: Callable[[str, psutil.Process | None], Tally]) -> None:
    alive = psutil.Process()
    assert watched("INFO ready\nWARNING request x ends here: refused\n", alive).findings == []
    (found,) = watched("INFO ready\nTraceback (most recent call last):\n  File x\nKeyError: 7\n", alive).findings
    assert found.what == "host logs: KeyError: 0"
    (found,) = watched("out of memory\n", None).findings
    assert found.what.startswith("host ended: out of memory")
