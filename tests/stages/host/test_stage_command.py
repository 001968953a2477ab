"""`onesweep host`: options, checkpoints and ports that it cannot use."""

from pathlib import Path

import pytest

from serving.cli.__main__ import main
from tests.stages.raw_client import Peer


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--blocks", "0,2"], 2, "blocks 0,2 are not consecutive"),
        (["--blocks", "7"], 2, "block 7 does not exist: this checkpoint has blocks 0 to 2"),
        (["--blocks", "x"], 2, "--blocks 'x' must be numbers such as 0 or 0,1"),
        (["--blocks", ""], 2, "--blocks '' must be numbers"),
        (["--blocks", "0", "--listen", "0.0.0.0:0"], 2, "accept it with --insecure"),
        (["--blocks", "0", "--listen", "here"], 2, "'here' must be HOST:PORT"),
        (["--blocks", "0", "--next", "there"], 2, "next address 'there' must be HOST:PORT"),
        (["a/b", "--blocks", "0"], 2, "host name 'a/b' must be"),
        (["--blocks", "0", "--device", "tpu"], 2, "--device must be cpu, cuda or cuda:N, not 'tpu'"),
        (["--blocks", "0", "--device", "cuda:99"], 2, "there is no device cuda:99 here"),
        (["--blocks", "0", "--set", "keep_warm_s=90"], 2, "keep_warm_s must be from 0 to 60, not 90"),
        (["--blocks", "0", "--set", "lease_s=nan"], 2, "lease_s must be above 0"),
        (["--blocks", "0", "--threads", "99999"], 2, "--threads must be at most"),
        (["--blocks", "0", "--checkpoint", "/nowhere"], 2, "no checkpoint in /nowhere"),
    ],
)
def test_a_wrong_option_is_explained(bundles: Path, capfd, arguments: list[str], code: int, says: str) -> None:
    defaults = ["--checkpoint", str(bundles / "own"), "--listen", "127.0.0.1:0"]
    assert main(["host", *defaults, *arguments]) == code
    _, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err


def test_a_port_in_use(bundles: Path, alone: Peer, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--checkpoint", str(bundles / "own"), "--blocks", "0", "--listen", alone.address]) == 1
    _, err = capfd.readouterr()
    assert f"onesweep: cannot listen on {alone.address}: the port is in use" in err
    assert "Traceback" not in err
