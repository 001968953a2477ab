from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.grafting.model import GraftModel
from trainer.grafting.optimizers import GraftOptimizers
from trainer.grafting.settings import GraftSettings
from trainer.grafting.task import GraftTask
from trainer.run import train_step


@pytest.fixture
def text(model: GraftModel) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    train, valid = torch.randint(200, (2, 400), generator=generator, dtype=torch.int32)
    return Corpus("numbers", train, valid)


def touched(model: GraftModel) -> set[str]:
    """Where gradients are: stage or what is added, and of which block."""
    found = set()
    for block in model.blocks:
        for name, module in (("stage", block.stage), ("added", block.added)):
            if any(p.grad is not None for p in module.parameters()):
                found.add(f"{name} {block.index}")
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GraftSettings(0), {"added 0"}),
        (GraftSettings(1), {"added 1"}),
        (GraftSettings(1, "block", "own"), {"added 1", "stage 1"}),
        (GraftSettings(0, "block", "last"), {"added 0", "stage 0"}),
        (GraftSettings(2, "block"), {"added 2", "stage 2"}),
    ],
)
def test_gradients_stay_within_the_block(
    shaken: GraftModel, text: Corpus, graft_config: TrainingConfig, settings: GraftSettings, expected: set[str]
) -> None:
    task = GraftTask(shaken, text, graft_config, settings)
    task.loss(0).total.backward()
    assert touched(shaken) == expected
    for frozen in (shaken.stages[0].embedding, shaken.stages[-1].head):
        assert all(p.grad is None for p in frozen.parameters())


def test_the_anchor_at_the_end_is_the_next_symbol_loss_of_the_whole(
    shaken: GraftModel, text: Corpus, graft_config: TrainingConfig
) -> None:
    task = GraftTask(shaken, text, graft_config, GraftSettings(0, "block"))
    known = text.batch(graft_config.seed, 0, graft_config.sequences, task.length + 1)
    x = known[:, :-1]
    for stage in shaken.stages:
        x = stage.read(x)
    logits = shaken.stages[-1].next_byte(x)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), known[:, 1:].flatten())
    assert float(task.loss(0).parts["next_nats"]) == pytest.approx(float(expected.detach()), abs=1e-4)


def test_training_slots_keeps_the_pretrained_model_bit_for_bit_and_lowers_their_loss(
    model: GraftModel, text: Corpus, graft_config: TrainingConfig
) -> None:
    config = replace(graft_config, steps=40, learning_rate=2e-2, chunks=(4,))
    known = text.valid_batch(2, 13)[:, :-1]
    before = model.stages[0].read(known)
    task = GraftTask(model, text, config, GraftSettings(0))
    optimizers, lesson = GraftOptimizers(task.module, config), lambda: float(task.loss(3).total.detach())
    first = lesson()
    for step in range(config.steps):
        train_step(task, optimizers, config, 3 if step % 2 else step)
    assert lesson() < first - 0.1
    assert torch.equal(model.stages[0].read(known), before)


def test_training_a_block_moves_it(model: GraftModel, text: Corpus, graft_config: TrainingConfig) -> None:
    known = text.valid_batch(2, 13)[:, :-1]
    before = model.stages[0].read(known)
    task = GraftTask(model, text, graft_config, GraftSettings(0, "block"))
    train_step(task, GraftOptimizers(task.module, graft_config), graft_config, 0)
    assert not torch.equal(model.stages[0].read(known), before)
