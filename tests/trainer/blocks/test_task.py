from dataclasses import replace

import pytest
import torch

from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel
from tests.trainer.small import corpus, make_blocks, partition, tiny
from trainer.blocks.losses import next_byte_loss
from trainer.blocks.task import ArTask, BlockTask


def test_the_loss_of_a_step_depends_only_on_seed_and_number() -> None:
    task = BlockTask(make_blocks()[0], partition, corpus, tiny)
    forward = [task.loss(step).parts for step in range(5)]
    torch.manual_seed(99)
    assert [task.loss(step).parts for step in reversed(range(5))] == forward[::-1]
    assert len({tuple(parts.items()) for parts in forward}) == 5
    other = BlockTask(task.module, partition, corpus, replace(tiny, seed=1))
    assert other.loss(0).parts != forward[0]


def test_each_block_has_its_own_noise() -> None:
    blocks = make_blocks()
    blocks[1].load_state_dict(blocks[0].state_dict())
    whole = NoisePartition("uniform", (10.0, 9.99, 9.98), overlap=0.0)
    losses = [BlockTask(b, whole, corpus, tiny).loss(0).parts["denoise_nats"] for b in blocks]
    assert losses[0] != losses[1]


def test_evaluation_is_repeatable_and_names_the_diagnostics() -> None:
    task = BlockTask(make_blocks()[1], partition, corpus, tiny)
    with torch.inference_mode():
        losses = task.evaluate()
        assert losses == task.evaluate()
    assert set(losses) == {
        "valid_next_byte_nats",
        "valid_next_byte_bits",
        "valid_from_noise_nats",
    }
    assert losses["valid_next_byte_bits"] == pytest.approx(losses["valid_next_byte_nats"] / 0.6931471805599453)


def test_the_ar_model_gets_the_windows_of_the_blocks() -> None:
    model = ArModel(tiny.architecture)
    task = ArTask(model, corpus, tiny)
    text = corpus.batch(tiny.seed, 4, tiny.sequences, 33)
    assert task.loss(4).parts == {"next_byte_nats": float(next_byte_loss(model(text[:, :-1]), text).detach())}
    with torch.inference_mode():
        assert task.evaluate()["valid_next_byte_nats"] > 0
