"""Mistakes in the commands of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rounds.network.calls import Start

WORK = ["train", "work", "--coordinator", "127.0.0.1:1"]
COORDINATE = ["train", "coordinate", "--listen", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*WORK, "--data", "/nowhere"], "no text at /nowhere"),
        ([*WORK, "--name", "a b"], "--name 'a b' must be"),
        (["train", "work", "--coordinator", "10.0.0.1:1"], "traffic would not be encrypted"),
        ([*WORK, "--block", "-1"], "--block must be the number of a part"),
        ([*WORK, "--machine", "1"], "--machine and --machines need --site"),
        ([*WORK, "--patience", "nan"], "--patience must be from 0"),
        ([*COORDINATE, "--lease", "0"], "--lease must be from 0.5"),
        (["train", "status", "127.0.0.1:1", "--once"], "no coordinator answers at 127.0.0.1:1: check the address, and"),
    ],
)
def test_a_wrong_option_is_explained(onesweep: Callable[..., Any], arguments: list[str], sentence: str) -> None:
    outcome = onesweep(*arguments)
    assert sentence in outcome.message
    assert outcome.code in (1, 2)


def test_a_checkpoint_of_another_run_is_refused(
    onesweep: Callable[..., Any], network: Start, text_file: Path, settings: Callable[..., Path], tmp_path: Path
) -> None:
    net = network()
    (other := net.out.with_name("other.toml")).write_text(settings().read_text() + "[rounds]\nrounds = 1\n")
    given = ("--config", other, "--data", text_file, "--out", net.out, "--threads", 1)
    outcome = onesweep("train", "coordinate", "--listen", "127.0.0.1:0", *given)
    assert "has a checkpoint of other settings or data; choose another --out" in outcome.message
    (fresh := tmp_path / "fresh" / "rounds").mkdir(parents=True)
    (fresh / "incoming").touch()
    outcome = onesweep("train", "coordinate", "--listen", "127.0.0.1:0", *given, "--out", fresh.parent)
    assert outcome.message == f"cannot store updates in {fresh}/incoming: File exists"
