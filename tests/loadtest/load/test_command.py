"""`onesweep bench loadtest`: its results, its end, and mistakes that end in a sentence."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from serving.cli.deployment import Deployment
from serving.cli.servers import MODULE
from tests.conftest import PATIENCE_S, Run
from tests.loadtest.conftest import check_refused

QUICK = ["--seconds", "1", "--bytes", "16", "--texts", "4"]


@pytest.fixture
def router(deployment: Deployment, locust: None) -> str:
    return deployment.topology.router


def test_a_whole_run(router: str, tmp_path: Path, onesweep: Run) -> None:
    path = tmp_path / "figures.json"
    code, out, _ = onesweep("bench", "loadtest", "--router", router, "--users", 2, *QUICK, "--json", path)
    assert code == 0
    whole = json.loads(path.read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert whole["commit"].removesuffix("+changes") == (head.stdout.strip() or "unknown")
    (record,) = whole["rows"]
    assert (whole["bench"], record["mode"], record["users"]) == ("loadtest", "sweep", 2)
    assert whole["settings"]["target"] == "as found"
    assert (record["failed"], record["lost"], record["wrong"], record["refused"]) == (0, 0, 0, 0)
    assert record["requests"] == record["right"] > 0
    assert record["outside"]["requests"] == record["outside"]["right"] > 0
    assert 0 < record["generator_cores"] < 2
    assert 0 < record["p50_ms"] <= record["p95_ms"] <= record["p99_ms"]
    assert f"{record['p95_ms']:,.1f}" in out
    assert "accepts 3 requests at once" in out
    assert "gevent" not in sys.modules, "the parent stays as it is; only the generator's process is changed"


def test_several_modes_and_numbers_of_users(router: str, tmp_path: Path, onesweep: Run) -> None:
    path = tmp_path / "figures.json"
    command = ["bench", "loadtest", "--router", router, "--users", "1,2", "--mode", "sweep,ar,local", *QUICK]
    code, out, _ = onesweep(*command, "--json", path)
    assert code == 0
    record = json.loads(path.read_text())
    assert "skipping local: the router serves only sweep, chunked, ar" in out
    assert [(row["mode"], row["users"]) for row in record["rows"]] == [("sweep", 1), ("sweep", 2), ("ar", 1), ("ar", 2)]
    assert all(row["right"] == row["requests"] > 0 for row in record["rows"])
    assert re.search(r"^sweep: (knee at|no knee up to) \d user", out, re.MULTILINE)


@pytest.mark.slow
def test_ctrl_c_ends_every_process(bundle: Path, locust: None) -> None:
    command = [sys.executable, *MODULE, "bench", "loadtest", "--checkpoint", str(bundle), "--hosts", "1", *QUICK]
    with subprocess.Popen([*command, "--seconds", "600"], stderr=subprocess.PIPE) as process:
        while len(children := psutil.Process(process.pid).children(recursive=True)) < 4:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S)[1].splitlines()[1:] == []
    assert process.returncode == 130
    assert len(children) == 4  # host, router, load generator, client beside the router
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mode", "swap"], "--mode: unknown value 'swap' (did you mean sweep?); choose from sweep, chunked, "),
        (["--profile", "moon"], "no profile 'moon'; available: "),
        (["--users", "2,2"], "--users lists '2' twice"),
        (["--users", "0"], "--users must each be a whole number from 1 to 1000000, not 0"),
        (["--hosts", "3"], "3 hosts cannot share 2 blocks: choose 1 to 2 hosts"),
        (["--json", "no/such/folder.json"], "cannot write no/such/folder.json: No such file or directory"),
        (["--router", "10.8.0.9:7700"], "is on another machine and traffic would not be encrypted"),
        (["--router", "nowhere"], "--router 'nowhere' must be HOST:PORT"),
        (["--router", "127.0.0.1:1"], "--router names a running deployment: omit --hosts, --checkpoint"),
    ],
)
def test_a_wrong_option_is_explained_before_anything_starts(
    bundle: Path, onesweep: Run, locust: None, arguments: list[str], sentence: str
) -> None:
    check_refused(onesweep("bench", "loadtest", "--checkpoint", bundle, *arguments), sentence)


def test_a_mode_that_the_deployment_lacks_is_refused(router: str, onesweep: Run) -> None:
    ended = onesweep("bench", "loadtest", "--router", router, "--mode", "local", "--bytes", 16)
    assert ended.code == 2
    assert "this deployment cannot serve local; it serves sweep, chunked, ar" in ended.message


def test_no_locust_is_an_error(bundle: Path, onesweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.benches.find_spec", lambda name: None)
    sentence = "the load test needs locust: pip install 'onesweep[loadtest]'"
    check_refused(onesweep("bench", "loadtest", "--checkpoint", bundle), sentence)
