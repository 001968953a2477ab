"""`onesweep deploy`: what it does not send, and options that make no sense."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onesweep.stages.checkpoint.release_store import read_release_manifest
from tests.serving.harm import harm_with

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("cut", "bytes, its manifest says"),
        ("flipped", "block-1-"),
        ("flipped", "is damaged (its SHA-256 is not the manifest's): fetch it again"),
        ("digest", "is damaged"),
        ("missing", "is missing: fetch it again"),
        ("untrained", "part 1 is not trained yet"),
        ("outside", "must be a plain .safetensors name"),
        ("no checkpoint", "no checkpoint in"),
    ],
)
def test_what_is_bad_here_is_not_sent(new: Path, tmp_path: Path, onesweep: Run, harm: str, says: str) -> None:
    shutil.copytree(new, tmp_path / "bad")
    harm_with(harm, tmp_path / "bad")
    code, _, err = onesweep("deploy", tmp_path / "bad", "--router", "127.0.0.1:1")
    assert (code, says in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the directory of a checkpoint to deploy, or --rollback"),
        (["weights", "--rollback"], "or --rollback"),
        (["--rollback", "--without", "a"], "--without is for a deployment"),
        (["--rollback", "--timeout-s", "0"], "--timeout-s must be above 0"),
    ],
)
def test_options_that_make_no_sense(onesweep: Run, arguments: list[str], says: str) -> None:
    code, _, err = onesweep("deploy", *arguments)
    assert (code, says in err) == (2, True), err


def test_damaged_files_of_what_is_served_already(old: Path, tmp_path: Path, local_ring: Any, onesweep: Run) -> None:
    damaged = Path(shutil.copytree(old, tmp_path / "damaged"))
    harm_with("flipped", damaged)
    with local_ring(old, 1) as client:
        served = client.status().release
        code, out, err = onesweep("deploy", damaged, "--router", client.address)
        assert (code, out, "is damaged" in err) == (2, "", True), err
        assert client.status().release == served


def test_without_shelves(old: Path, new: Path, local_ring: Any, onesweep: Run) -> None:
    with local_ring(old, 1) as client:
        code, _, err = onesweep("deploy", new, "--router", client.address)
        assert (code, "the router has no shelf for releases: start it, and the hosts, with --shelf DIR" in err) == (
            2,
            True,
        )
        code, _, err = onesweep("deploy", "--rollback", "--router", client.address)
        assert (code, "there is no release to go back to" in err) == (2, True)
        assert client.status().release == read_release_manifest(old).name
