from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.block import Block
from stages.errors import ResumeError
from trainer.config import TrainingConfig
from trainer.optimizer import OptimizerSet
from trainer.state import Reached, load_state, save_state, state_path


@pytest.fixture
def trained(make_blocks: Callable[..., list[Block]], tiny: TrainingConfig) -> tuple[Block, OptimizerSet]:
    block = make_blocks()[0]
    optimizers = OptimizerSet(block, tiny)
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(0)
    return block, optimizers


@pytest.fixture
def saved(tmp_path: Path, trained: tuple[Block, OptimizerSet]) -> Path:
    path = state_path(tmp_path, "block-0")
    save_state(path, *trained, reached=Reached(5, 2.5), identity="this run")
    return path


def test_a_state_comes_back_whole(
    saved: Path, trained: tuple[Block, OptimizerSet], make_blocks: Callable[..., list[Block]], tiny: TrainingConfig
) -> None:
    block = make_blocks()[1]
    optimizers = OptimizerSet(block, tiny)
    assert load_state(saved, block, optimizers, "this run") == Reached(5, 2.5)
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), trained[0].parameters(), strict=True))
    back, there = optimizers.tensors(), trained[1].tensors()
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], there[name]) for name in back)


def test_another_runs_state_is_refused(saved: Path, trained: tuple[Block, OptimizerSet]) -> None:
    with pytest.raises(ResumeError, match="belongs to a run with other settings or data; give the same ones"):
        load_state(saved, *trained, "another run")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    path.write_bytes(b"nothing of the kind")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-50] ^= 1
    path.write_bytes(raw)


def drop(path: Path) -> None:
    tensors = load_file(path)
    del tensors["module.slot"]
    save_file(tensors, path, {"step": "5", "identity": "this run"})


def unstep(path: Path) -> None:
    save_file(load_file(path), path, {"identity": "this run"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "cannot be read"),
        (garble, "cannot be read"),
        (flip, "is damaged: its tensors do not have the recorded SHA-256"),
        (drop, "does not fit this run"),
        (unstep, "does not fit this run"),
    ],
)
def test_a_damaged_state_is_refused(
    saved: Path, trained: tuple[Block, OptimizerSet], damage: Callable[[Path], None], message: str
) -> None:
    damage(saved)
    with pytest.raises(ResumeError, match=message) as caught:
        load_state(saved, *trained, "this run")
    assert "delete it to start anew" in str(caught.value)
