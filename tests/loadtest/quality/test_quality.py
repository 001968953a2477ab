"""`onesweep bench quality` over a real ring, on a tiny bundle; and mistakes that end in a sentence."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from onesweep.loadtest.quality.panel import QualityRow
from onesweep.serving.cli.__main__ import main
from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import Client
from onesweep.serving.router.topology import local_topology
from tests.conftest import until

SIZES = ["--count", "4", "--bytes", "20", "--prompt-bytes", "16", "--judge", "ngram"]


@pytest.fixture(scope="module")
def deployment(bundle: Path) -> Any:
    with temporary_deployment(local_topology(2, 2, bundle, free_port_block(3) + 1), bundle) as deployed:
        yield deployed


@pytest.mark.slow
def test_a_whole_run(bundle: Path, python_docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "q.json"), "--html", str(tmp_path / "q.html")]
    modes = ["--modes", "sweep:steps=2,chunked:chunk=5:steps=1", "--temperatures", "0.5,1"]
    arguments = ["bench", "quality", "--prompts", str(python_docs), "--weights", str(bundle), *modes, *SIZES, *files]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "q.json").read_text())
    rows = [QualityRow.from_record(row) for row in record["rows"]]
    assert [row.spec or row.mode for row in rows] == [
        "sweep:steps=2:temperature=0.5",
        "sweep:steps=2:temperature=1.0",
        "chunked:chunk=5:steps=1:temperature=0.5",
        "chunked:chunk=5:steps=1:temperature=1.0",
        "human",
    ]
    assert [row.sweeps for row in rows] == [1, 1, 4, 4, None]
    assert [row.chunk for row in rows][2:] == [5, 5, None]
    assert all(row.n == 4 for row in rows)
    assert all(row.figure("judge_bits_per_byte") for row in rows)
    assert rows[-1].figure("judge_bits_per_byte") < min(row.figure("judge_bits_per_byte") for row in rows[:-1])
    assert rows[0].figures["judge_minus_human"].low is not None
    assert "few" in rows[0].reasons["auc"]
    assert "no auc" in printed
    assert set(record["weights"]) == {"chain", "ar"}
    assert (record["judge"], record["seed"], record["prompts"]["count"]) == ("ngram-6", 0, 4)
    assert len(record["samples"]) == 4
    page = (tmp_path / "q.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert page.count("<dl") == 4
    assert "sweep:steps=2:temperature=0.5" in page


@pytest.mark.slow
def test_the_same_texts_from_a_running_router(
    deployment: Deployment, python_docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = []
    for in_flight in ("1", "8"):
        path = tmp_path / f"{in_flight}.json"
        arguments = ["--router", deployment.topology.router, "--in-flight", in_flight, "--json", str(path)]
        assert main(["bench", "quality", "--prompts", str(python_docs), *SIZES, *arguments]) == 0
        records.append(json.loads(path.read_text()))
    first, second = records
    assert first["samples"] == second["samples"]
    assert {row["mode"] for row in first["rows"]} >= {"sweep", "chunked", "ar", "human"}
    assert first["weights"]["chain"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "sentence"),
    [
        ("ar,local", "mode local cannot be served: its weights are not there; there are sweep, chunked, ar"),
        ("sweep,sweep:steps=9999", "sweep:steps=9999: steps must be a whole number from 1 to"),
        ("ar:temperature=1000", "ar:temperature=1000.0: temperature must be from 0 to"),
    ],
)
def test_what_a_router_refuses_is_said_once(
    deployment: Deployment, python_docs: Path, capsys: pytest.CaptureFixture[str], modes: str, sentence: str
) -> None:
    arguments = ["--router", deployment.topology.router, "--modes", modes]
    assert main(["bench", "quality", "--prompts", str(python_docs), *SIZES, *arguments]) == 2
    assert capsys.readouterr().err.count(sentence) == 1
    with Client(deployment.topology.router) as client:  # the router hears of its hosts once a second
        until(lambda: not any(host.sessions for host in client.status().hosts))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--modes", "swep"], "unknown mode 'swep'"),
        (["--judge", "gpt"], "unknown judge 'gpt'; choose from smollm2-135m, ngram"),
        (["--count", "0"], "--count must be at least 1, not 0"),
        (["--bytes", "0"], "--bytes must be at least 1, not 0"),
        (["--count", "1000000"], "the text has room for"),
        (["--seed", "-1"], "--seed must be from 0 to"),
        (["--router", "127.0.0.1:1", "--weights", "x"], "leave out --weights"),
        (["--temperatures", "a"], "--temperatures 'a' must be numbers"),
        (["--json", "/no/such/folder.json"], "cannot write /no/such/folder.json"),
        (["--html", "/no/such/folder.html"], "cannot write /no/such/folder.html"),
    ],
)
def test_mistakes_end_in_a_sentence(
    python_docs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["bench", "quality", "--prompts", str(python_docs), "--judge", "ngram", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_no_router_there(python_docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", "--prompts", str(python_docs), *SIZES, "--router", "127.0.0.1:1"]) == 1
    assert "no router answers at 127.0.0.1:1" in capsys.readouterr().err


def interrupted(arguments: list[str], ready: Callable[[psutil.Process], bool]) -> tuple[int, str]:
    """Exit code and last words of a run that gets Ctrl-C when it is `ready`."""
    # an interpreter of its own: a signal meets it as a user's does, not as a fork of the tests' template
    script = "import sys; from onesweep.serving.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "bench", "quality", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 90
        while not ready(psutil.Process(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=90)
    return process.returncode, words


LONG = ["--count", "500", "--bytes", "64", "--prompt-bytes", "16", "--judge", "ngram", "--modes", "ar"]


@pytest.mark.slow
def test_ctrl_c_leaves_no_host_behind(bundle: Path, python_docs: Path) -> None:
    started: list[psutil.Process] = []

    def ready(process: psutil.Process) -> bool:
        started[:] = process.children()
        return len(started) == 3

    arguments = ["--prompts", str(python_docs), "--weights", str(bundle), *LONG]
    assert interrupted(arguments, ready) == (130, "")
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
def test_ctrl_c_cancels_what_is_in_flight(deployment: Deployment, python_docs: Path) -> None:
    with Client(deployment.topology.router) as client:
        arguments = ["--prompts", str(python_docs), "--router", deployment.topology.router, *LONG]
        assert interrupted(arguments, lambda process: client.status().requests > 4) == (130, "")
        until(lambda: client.status().requests == 0)
