from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stages.grafting.block import Noisy, first_of_chunks
from trainer.grafting.chain import read_all, roll
from trainer.grafting.model import GraftModel
from trainer.objectives import ChunkLayout

LENGTH = 10


def symbols(model: GraftModel, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.stages[0].architecture.vocabulary, (2, LENGTH), generator=generator)


def noisy(model: GraftModel, layout: ChunkLayout, sigma: float = 0.7) -> Noisy:
    z, estimate = torch.randn(2, 2, LENGTH, model.head.codes.shape[1])
    first = first_of_chunks(layout.indices())
    return Noisy(z, estimate / 10, torch.full((2, LENGTH), sigma), first, layout.mask())


def features(model: GraftModel, known: Tensor, slots: Noisy) -> Tensor:
    """Of the slots after the last block, the same states at every block."""
    _, memories = read_all(model.blocks, known)
    x = model.blocks[0].enter(known, slots.first)
    for block, memory in zip(model.blocks, memories, strict=True):
        x = block.denoise(x, slots, memory)
    return x


def test_the_clean_stream_is_the_pretrained_models_bit_for_bit(shaken: GraftModel) -> None:
    known = x = symbols(shaken)
    for stage in shaken.stages:
        x = stage.read(x)
    assert torch.equal(read_all(shaken.blocks, known)[0], x)


def test_before_training_a_chunk_of_one_slot_says_what_the_pretrained_model_says(model: GraftModel) -> None:
    known, last = symbols(model), model.blocks[-1]
    clean, _ = read_all(model.blocks, known)
    hidden = last.added.way_out(features(model, known, noisy(model, ChunkLayout(LENGTH, 1))))
    expected = last.stage.next_byte(clean).flatten(0, 1)
    torch.testing.assert_close(model.head.logits(hidden.flatten(0, 1)), expected, atol=1e-4, rtol=1e-4)


def test_before_training_noise_changes_nothing_but_what_slots_read_in_block_0(model: GraftModel) -> None:
    known, slots = symbols(model), noisy(model, ChunkLayout(LENGTH, 4))
    _, memories = read_all(model.blocks, known)
    x = torch.randn(2, LENGTH, model.stages[0].architecture.width)
    for block, memory in zip(model.blocks[1:], memories[1:], strict=True):
        other = replace(slots, z=slots.z + 1, sigma=slots.sigma * 3)
        assert torch.equal(block.denoise(x, slots, memory), block.denoise(x, other, memory))


@pytest.mark.parametrize("what", ["clean", "state"])
def test_slots_see_earlier_clean_positions_and_their_own_chunk(shaken: GraftModel, what: str) -> None:
    known, layout = symbols(shaken), ChunkLayout(LENGTH, 4)  # chunks: 0-3, 4-7, 8-9
    slots = noisy(shaken, layout)
    changed, at = known.clone(), 5
    z = slots.z.clone()
    if what == "clean":
        changed[:, at] = (changed[:, at] + 1) % 200
    else:
        z[:, at] += 1
    difference = features(shaken, changed, replace(slots, z=z)) - features(shaken, known, slots)
    moved = difference.abs().amax(dim=(0, 2)) > 1e-6
    expected = torch.arange(LENGTH) >= 8 if what == "clean" else layout.indices() == 1
    assert torch.equal(moved, expected)


def test_a_slot_does_not_see_its_own_state_where_none_comes_after_it(shaken: GraftModel) -> None:
    known, slots = symbols(shaken), noisy(shaken, ChunkLayout(LENGTH, LENGTH))
    z = slots.z.clone()
    z[:, -1] += 1
    assert torch.equal(features(shaken, known, replace(slots, z=z)), features(shaken, known, slots))


def test_the_guess_is_the_posterior_mean() -> None:
    z, nothing = torch.randn(1, 3, 4), torch.zeros(1, 3, 4)
    slots = Noisy(z, nothing, torch.full((1, 3), 0.5), torch.ones(3, dtype=torch.bool), torch.zeros(3, 3))
    torch.testing.assert_close(slots.guess(), z * 0.25 / (0.25 + 0.25))
    sure = F.normalize(torch.randn(1, 3, 4), dim=2)
    torch.testing.assert_close(replace(slots, estimate=sure).guess(), sure, atol=1e-5, rtol=1e-5)


def test_noisier_states_are_made_from_the_slots_own(shaken: GraftModel) -> None:
    known = symbols(shaken)
    slots = noisy(shaken, ChunkLayout(LENGTH, 4))
    _, memories = read_all(shaken.blocks, known)
    entered = shaken.blocks[0].enter(known, slots.first)
    levels, seen = [slots.sigma * 4, slots.sigma], []
    blocks = shaken.blocks[:2]
    for block in blocks:
        block.added.state_in.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    roll(blocks, memories[:2], entered, slots, levels, torch.randn(2, *slots.z.shape), None)
    again = replace(slots, estimate=torch.zeros_like(slots.z))
    torch.testing.assert_close(seen[1], again.guess().roll(1, dims=1))  # no more noise, so the same state
    assert not torch.allclose(seen[0], seen[1])
