"""`onesweep bench fuzz`: a short run with real processes, and the checks that would find something."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from onesweep.loadtest.fuzz import answers, healthy
from onesweep.loadtest.fuzz.base import SAMPLE_BYTES, TargetTally
from onesweep.loadtest.fuzz.run import check_empty
from onesweep.loadtest.fuzz.testbed import ProcessWatch
from onesweep.serving.cli.__main__ import main
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.serving.cli.ports import free_port_block
from tests.stages.pictures.tiny import tiny_picture_bundle


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_a_short_run_finds_nothing(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi", reason="the extra `http` is not installed")
    path = tmp_path / "run.json"
    targets = "stage,router,http"
    served = SHIPPED if kind == "text" else tiny_picture_bundle(tmp_path / "bundle")
    options = ("--seed", "7", "--targets", targets, "--checkpoint", str(served), "--json", str(path))
    assert main(["bench", "fuzz", "--inputs", "300", *options]) == 0
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


@pytest.mark.parametrize(
    ("log", "lives", "found"),
    [
        ("INFO ready\nWARNING request x ends here: refused\n", True, []),
        ("INFO ready\nTraceback (most recent call last):\n  File x\nKeyError: 7\n", True, ["host logs: KeyError: 0"]),
        ("out of memory\n", False, ["host ended: out of memory\n"]),
    ],
)
def test_the_watch_sees_tracebacks_and_ends(log: str, lives: bool, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "host.log").write_text(log)
    processes = {"host": psutil.Process() if lives else None}
    testbed: Any = SimpleNamespace(processes=lambda: processes, log=lambda name: tmp_path / "host.log")
    tally = TargetTally("stage")
    ProcessWatch(testbed).look(tally)
    assert [finding.what for finding in tally.findings] == found


class OddClient:
    """Answers, and once it is broken raises what no client should."""

    broken = False

    def __init__(self, address: str) -> None:
        return

    def __enter__(self) -> OddClient:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def generate(self, prompt: str, **settings: Any) -> Any:
        if self.broken:
            raise KeyError("who")
        return SimpleNamespace(output=b"a")


def test_a_witness_that_breaks_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthy, "Client", OddClient)
    testbed: Any = SimpleNamespace(router="router", gateway="gateway", checkpoint=SHIPPED)
    witness = healthy.Healthy(testbed)
    monkeypatch.setattr(OddClient, "broken", True)
    witness.start()
    witness.stop()
    assert witness.trouble == ["the thread ended: KeyError: 'who'", "no healthy request was answered"]


def test_a_dead_host_is_a_finding() -> None:
    tally = TargetTally("all")
    asyncio.run(check_empty([f"127.0.0.1:{free_port_block(1)}"], tally))
    assert [finding.what for finding in tally.findings] == ["a host does not say what it holds: UNAVAILABLE"]


def test_who_is_answered_nothing_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SILENT_S", 0.5)
    dead = f"127.0.0.1:{free_port_block(1)}"
    testbed: Any = SimpleNamespace(deceived=dead, between=[], checkpoint=SHIPPED)
    captures: Any = SimpleNamespace(answers={method.name: [] for method in answers.STAGE.methods})

    async def send() -> answers.AnswersTarget:
        target = answers.AnswersTarget(testbed, captures, random.Random(1))
        await target.send(5)
        await target.close()
        return target

    target = asyncio.run(send())
    assert [finding.what for finding in target.tally.findings] == ["nothing was answered for 0.5 s"]


def test_a_long_input_is_kept_in_part_and_its_length_in_full() -> None:
    tally = TargetTally("stage")
    tally.finding("it broke", bytes(SAMPLE_BYTES + 1))
    record = tally.findings[0].to_record()
    assert (len(str(record["sample_hex"])), record["sample_bytes"]) == (2 * SAMPLE_BYTES, SAMPLE_BYTES + 1)
