from dataclasses import replace

import pytest
import torch

from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.pipeline import ArModel
from onesweep.trainer.blocks.losses import next_byte_loss
from onesweep.trainer.blocks.task import ArTask, BlockTask
from tests.trainer.small import corpus, make_blocks, partition, tiny


def test_the_features_of_earlier_blocks_are_detached() -> None:
    first, second = make_blocks(context="chained")
    task = BlockTask(second, [first], partition, corpus, tiny)
    before = [parameter.detach().clone() for parameter in first.parameters()]
    task.loss(0).total.backward()
    assert all(parameter.grad is None for parameter in first.parameters())
    assert all(parameter.grad is not None for parameter in second.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, first.parameters(), strict=True))


def test_a_chained_block_reads_the_features_of_the_one_before() -> None:
    first, second = make_blocks(context="chained")
    loss = BlockTask(second, [first], partition, corpus, tiny).loss(0).parts["next_byte_nats"]
    first.embedding.weight.data += 1
    assert BlockTask(second, [first], partition, corpus, tiny).loss(0).parts["next_byte_nats"] != loss


def test_a_step_depends_on_nothing_but_its_number() -> None:
    task = BlockTask(make_blocks()[0], [], partition, corpus, tiny)
    forward = [task.loss(step).parts for step in range(5)]
    torch.manual_seed(99)
    assert [task.loss(step).parts for step in reversed(range(5))] == forward[::-1]
    assert len({tuple(parts.items()) for parts in forward}) == 5
    other = BlockTask(task.module, [], partition, corpus, replace(tiny, seed=1))
    assert other.loss(0).parts != forward[0]


def test_blocks_get_noise_of_their_own() -> None:
    blocks = make_blocks()
    blocks[1].load_state_dict(blocks[0].state_dict())
    whole = NoisePartition("uniform", (10.0, 9.99, 9.98), overlap=0.0)
    losses = [BlockTask(b, [], whole, corpus, tiny).loss(0).parts["denoise_nats"] for b in blocks]
    assert losses[0] != losses[1]


def test_every_chunk_size_is_drawn() -> None:
    task = BlockTask(make_blocks(layers=1)[0], [], partition, corpus, tiny)
    assert {task.loss(step).parts["chunk"] for step in range(40)} == {1, 4, 32}


def test_blocktrain_profile_trains_every_slot_on_its_own() -> None:
    config = replace(tiny, chunks=(1,), self_condition=0.0)
    task = BlockTask(make_blocks(layers=1)[0], [], partition, corpus, config)
    assert {task.loss(step).parts["chunk"] for step in range(8)} == {1}


def test_evaluation_is_repeatable_and_names_the_diagnostics() -> None:
    first, second = make_blocks(context="chained")
    task = BlockTask(second, [first], partition, corpus, tiny)
    with torch.inference_mode():
        losses = task.evaluate()
        assert losses == task.evaluate()
    assert set(losses) == {
        "valid_next_byte_nats",
        "valid_next_byte_bits",
        "valid_sigma_max_nats",
        "valid_from_noise_nats",
        "valid_from_noise_scrambled_nats",
    }
    assert losses["valid_next_byte_bits"] == pytest.approx(losses["valid_next_byte_nats"] / 0.6931471805599453)


def test_the_ar_model_gets_the_windows_that_blocks_get() -> None:
    model = ArModel(tiny.architecture)
    task = ArTask("ar", model, corpus, tiny)
    text = corpus.batch(tiny.seed, 4, tiny.sequences, 33)
    assert task.loss(4).parts == {"next_byte_nats": float(next_byte_loss(model(text[:, :-1]), text).detach())}
    with torch.inference_mode():
        assert task.evaluate()["valid_next_byte_nats"] > 0
