"""`onesweep deploy`: damaged checkpoints, and interrupts."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from serving.client.client import AsyncClient
from tests.conftest import Run
from tests.serving.harm import harm_with


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("cut", "bytes, but its manifest says"),
        ("flipped", "is damaged (its SHA-256 is not the manifest's): fetch it again"),
        ("digest", "is damaged"),
        ("missing", "is missing: fetch it again"),
        ("untrained", "part 1 has no weights yet"),
        ("outside", "must be a plain .safetensors name"),
        ("no checkpoint", "no checkpoint in"),
    ],
)
def test_a_damaged_checkpoint_is_not_sent(new: Path, tmp_path: Path, onesweep: Run, harm: str, says: str) -> None:
    shutil.copytree(new, tmp_path / "bad")
    harm_with(harm, tmp_path / "bad")
    code, _, err = onesweep("deploy", tmp_path / "bad", "--router", "127.0.0.1:1")
    assert (code, says in err) == (2, True), err


def test_ctrl_c_explains_which_release_stays(new: Path, onesweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncClient, "exchange", Mock(side_effect=KeyboardInterrupt))
    for arguments in (new,), ("--rollback",):
        code, _, err = onesweep("deploy", *arguments, "--router", "127.0.0.1:1")
        assert (code, "interrupted: routers that had not switched keep their release" in err) == (130, True), err
