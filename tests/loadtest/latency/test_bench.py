"""`onesweep bench wan`: what is refused before a lab is made, and whole runs in a real one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from onesweep.loadtest.lab.lab import lab_problem
from onesweep.serving.cli.__main__ import main
from onesweep.serving.cli.deployment import MODULE
from tests.conftest import until
from tests.loadtest.conftest import check_refused
from tests.serving.pretrained import write_model

needs_a_lab = pytest.mark.skipif(bool(lab_problem()), reason=lab_problem() or "there is one")
HOSTS = ("host-1", "host-2")


def bench(bundle: Path, *options: object) -> list[str]:
    return ["bench", "wan", "--checkpoint", str(bundle), *map(str, options)]


# Before a lab is made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profile", "atlantis"), "atlantis"),
        (("--profile", ","), "--profile is empty"),
        (("--profile", "lan,lan"), "--profile names 'lan' twice"),
        (("--profile", "lan", "--profiles", "/nowhere/p.toml"), "/nowhere/p.toml"),
        (("--profile", "lan", "--modes", "swep"), "unknown mode 'swep' in --modes"),
        (("--profile", "lan", "--modes", "local"), "mode local needs local/"),
        (("--profile", "lan", "--requests", 0), "--requests must be at least 1, not 0"),
        (("--profile", "lan", "--seed", -1), "--seed must be from 0 to"),
        (("--profile", "lan", "--bytes", "0"), "--bytes must be 1 to 53, what the context leaves after"),
        (("--profile", "lan", "--bytes", "8,54"), "--bytes must be 1 to 53"),
        (("--profile", "lan", "--bytes", "many"), "--bytes 'many' must be numbers such as 32,256"),
        (("--profile", "loopback", "--max-tokens", "54"), "--max-tokens must be 1 to 53"),
        (("--profile", "lan", "--text", "new"), "unknown text 'new' in --text; choose from novel, copying"),
        (("--profile", "lan", "--text", "copying"), "no --bytes is small enough"),
        (("--profile", "lan", "--prompt", "/nowhere/p.txt"), "cannot read /nowhere/p.txt"),
        (("--profile", "lan", "--temperature", "101"), "--temperature must be 0 to 100"),
        (("--profile", "lan", "--at-once", 0), "--at-once must be from 1 to 64, not 0"),
        (("--profile", "lan", "--modes", "ar-speculative:model"), "mode ar-speculative:model needs local/"),
        (("--profile", "lan", "--modes", "ar-speculative:both"), "mode ar-speculative:both needs local/"),
        (("--profile", "lan", "--hosts", 3), "--hosts must be 1 to 2"),
        (("--profile", "lan", "--hosts", 0), "--hosts must be 1 to 2"),
        (("--profile", "lan", "--backend", "abacus"), "unknown backend 'abacus'; choose from torch,"),
        (("--profile", "lan", "--idle-s", "nan"), "--idle-s must be from 0 to 3600"),
        (("--profile", "lan", "--json", "/nowhere/r.json"), "cannot write /nowhere/r.json"),
        (("--profile", "lan", "--html", "/nowhere/r.html"), "cannot write /nowhere/r.html"),
    ],
)
def test_refused_with_a_sentence(
    bundle: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    says: str,
) -> None:
    monkeypatch.setattr("onesweep.loadtest.workload.testbed.temporary_lab", lambda *_: pytest.fail("a lab was made"))
    monkeypatch.setattr("onesweep.loadtest.latency.run.lab_problem", lambda: "")
    sizes = () if {"--bytes", "--max-tokens"}.intersection(options) else ("--bytes", 8)
    check_refused(capsys, bench(bundle, *options, *sizes), says)


def test_no_lab_can_be_made(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onesweep.loadtest.latency.run.lab_problem", lambda: "there is no /dev/net/tun")
    assert main(bench(bundle, "--profile", "lan", "--bytes", 8)) == 1
    assert capsys.readouterr().err == "onesweep: there is no /dev/net/tun\n"


# On this machine


def test_a_token_model_without_a_lab(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onesweep.loadtest.latency.run.lab_problem", lambda: "there is no lab")
    write_model(tmp_path / "model")
    (tmp_path / "sea.txt").write_text("the old man and the sea\n")
    options = ("--profile", "loopback", "--modes", "ar,ar-speculative:lookup", "--max-tokens", 6, "--temperature", 1)
    options += ("--backend", "onnxruntime")
    files = ("--prompt", tmp_path / "sea.txt", "--json", tmp_path / "r.json")
    assert main(bench(tmp_path / "model", *options, *files, "--requests", 1, "--at-once", 2)) == 0
    loaded = json.loads((tmp_path / "r.json").read_text())
    for row in loaded["rows"]:
        assert (row["profile"], row["text"], row["length"], row["unit"]) == ("loopback", "files", 6, "tokens")
        assert (row["requests"], row["failures"], row["tokens"]) == (2, 0, 6)
    _, guessed = loaded["rows"]
    assert (guessed["same_as_ar"], guessed["compared"]) == (2, 2)
    assert [sample["seed"] for sample in loaded["samples"]] == [0, 1, 0, 1]
    assert {sample["prompt"] for sample in loaded["samples"]} == {"the old man and the sea"}
    assert loaded["links"] == loaded["control"] == []
    assert "2 of 2" in capsys.readouterr().out


# In a real lab


@pytest.fixture(scope="module")
def record(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("wan")
    options = ("--profile", "links-20", "--modes", "sweep,ar:fp32", "--bytes", "8", "--requests", 2, "--idle-s", 0.2)
    files = ("--json", folder / "r.json", "--html", folder / "r.html")
    assert main(bench(bundle, *options, "--seed", 3, *files)) == 0
    assert (folder / "r.html").read_text().startswith("<!doctype html>")
    loaded: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return loaded


@needs_a_lab
def test_a_whole_run(record: dict[str, Any]) -> None:
    assert [(r["profile"], r["mode"], r["idle_s"], r["requests"], r["failures"]) for r in record["rows"]] == [
        ("links-20", "sweep", 0.0, 2, 0),
        ("links-20", "ar:fp32", 0.0, 2, 0),
        ("links-20", "sweep", 0.2, 2, 0),
        ("links-20", "ar:fp32", 0.2, 2, 0),
    ]
    for row in record["rows"]:
        assert row["sweeps"] == {"sweep": 1, "ar:fp32": 8}[row["mode"]]
        assert row["first_byte_ms"] <= row["p50_ms"] <= row["p95_ms"]
    assert (record["settings"]["seed"], record["settings"]["hosts"]) == (3, 2)
    assert {sample["seed"] for sample in record["samples"]} == {3, 4}


@needs_a_lab
def test_nothing_beats_the_floor(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        assert row["ratio"] >= 1, row


@needs_a_lab
def test_the_lab_keeps_its_promise(record: dict[str, Any]) -> None:
    pairs = {frozenset((link["source"], link["destination"])) for link in record["links"]}
    assert pairs == {frozenset(pair) for pair in (("router", "host-1"), HOSTS, ("host-2", "router"))}
    assert all(link["p50_ms"] >= link["nominal_ms"] > 0 for link in record["links"])
    assert [row["profile"] for row in record["control"]] == ["lan", "loopback"] * 2


def started(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """The descendants of a bench once its deployment serves."""
    parent = psutil.Process(command.pid)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        children = parent.children(recursive=True)
        if any("onesweep.loadtest.workload.caller" in " ".join(_command(child)) for child in children):
            return children
        time.sleep(0.05)
    pytest.fail("the bench did not begin to measure")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@needs_a_lab
def test_kill_9_leaves_nothing_behind(bundle: Path, tmp_path: Path) -> None:
    options = bench(bundle, "--profile", "links-20", "--modes", "ar", "--bytes", 32, "--requests", 1000)
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # logs are files, and nobody can remove them after a kill -9
    with subprocess.Popen(
        [sys.executable, *MODULE, *options], env={**os.environ, "TMPDIR": str(tmp_path)}, **kept
    ) as command:
        try:
            children = started(command)
            command.kill()
            out = command.communicate(timeout=120)[0]
        finally:
            command.kill()
    assert "Traceback" not in out
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), 60)
