"""`onesweep host`: options, checkpoints and ports that it cannot use."""

from pathlib import Path

import pytest

from tests.conftest import Run
from tests.stages.raw_client import Peer

TOPOLOGY = """
[[hosts]]
name = "paris"
address = "127.0.0.1:1"
listen = "LISTEN"
blocks = [0, 1]
[[hosts]]
name = "tokyo"
address = "NEXT"
blocks = LAST
"""
DEFAULTS = {"LISTEN": "127.0.0.1:0", "NEXT": "127.0.0.1:3", "LAST": "[2]"}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["tokyo", "LAST=[2, 3]"], 2, "block 3 does not exist: this checkpoint has blocks 0 to 2"),
        (["paris", "LAST=[2, 3]"], 2, "the block count is 4 in the topology, but 3 in the checkpoint: make"),
        (["paris", "LISTEN=0.0.0.0:0"], 2, "accept it with --insecure"),
        (["paris", "NEXT=10.0.0.9:1"], 2, "next address 10.0.0.9:1 is on another machine"),
        (["pari"], 2, "no host 'pari' (did you mean paris?"),
        ([], 2, "NAME is missing"),
        (["paris", "--blocks", "0"], 2, "no option --blocks"),
        (["paris", "--device", "tpu"], 2, "--device must be cpu, cuda or cuda:N, not 'tpu'"),
        (["paris", "--set", "keep_warm_s=90"], 2, "keep_warm_s must be from 0 to 60, not 90"),
        (["paris", "--set", "lease_s=nan"], 2, "lease_s must be above 0"),
        (["paris", "--threads", "99999"], 2, "--threads must be at most"),
        (["paris", "--checkpoint", "/nowhere"], 2, "no checkpoint in /nowhere"),
    ],
)
def test_a_wrong_option_is_explained(
    bundles: Path, tmp_path: Path, onesweep: Run, arguments: list[str], code: int, says: str
) -> None:
    text = TOPOLOGY
    changed = dict(each.split("=") for each in arguments if each.partition("=")[0] in DEFAULTS)
    for word, value in (DEFAULTS | changed).items():
        text = text.replace(word, value)
    (tmp_path / "t.toml").write_text(text)
    given = [each for each in arguments if "=" not in each or each[0].islower()]
    ended = onesweep("host", "--topology", tmp_path / "t.toml", "--checkpoint", bundles / "own", *given)
    assert ended.code == code
    assert says in ended.err


def test_a_used_port_is_an_error(bundles: Path, alone: Peer, tmp_path: Path, onesweep: Run) -> None:
    path = tmp_path / "t.toml"
    path.write_text(f'[[hosts]]\naddress = "{alone.address}"\nblocks = [0, 1, 2]\n')
    ended = onesweep("host", "host-1", "--topology", path, "--checkpoint", bundles / "own")
    assert ended.code == 1
    assert f"onesweep: cannot listen on {alone.address}: the port is in use" in ended.err
