"""The command line of a distillation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stages.manifest import read_manifest
from tests.stages.llama.tiny import write_tiny
from trainer.distill.commands import layer_list


def test_a_drafter_is_put_beside_its_model(onesweep: Callable[..., object], tmp_path: Path, text_file: Path) -> None:
    write_tiny(tmp_path)
    words = (
        f"distill --checkpoint {tmp_path} --text {text_file} --steps 1 --window 16 --layers 0-1 --threads 1 --float32"
    )
    done = onesweep(*words.split())
    assert done.code == 0
    assert f"{tmp_path / 'local'}: 128 symbols in 0.0 minutes; on text of the model's own KL " in done.out
    assert done.out.rstrip().endswith("ms a guess")
    assert read_manifest(tmp_path / "local").training["layers"] == [0, 1]
    again = onesweep(*words.split())
    assert (again.code, again.out) == (2, done.out.splitlines()[0] + "\n")
    assert "is there already, and finished" in again.message


def test_no_time_and_no_steps_is_a_sentence(onesweep: Callable[..., object], tmp_path: Path) -> None:
    done = onesweep("distill", "--checkpoint", tmp_path, "--text", tmp_path)
    assert (done.code, done.message) == (2, "say how long to train: either --steps or --minutes")


def test_layers_are_listed_or_a_range() -> None:
    assert layer_list("0,1,5") == (0, 1, 5)
    assert layer_list("2-4") == (2, 3, 4)
    assert layer_list("0-1,7,9-10") == (0, 1, 7, 9, 10)
    with pytest.raises(ValueError, match="invalid literal"):
        layer_list("all")
