from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.stages.grafting.block import CPU_ROWS, GraftHead, Noisy, StateLikelihood, first_of_chunks
from onesweep.trainer.blocks.losses import ChunkLayout
from onesweep.trainer.grafting.batch import head_losses, read_all, roll
from onesweep.trainer.grafting.model import GraftModel

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
    """Against an integral over codes: prior N(E, (1 - |E|^2) / dim), state z = code + sigma eps, by dimension."""
    z, sigma = torch.randn(1, 3, 4, dtype=torch.float64), 0.5
    estimate = torch.tensor([[[0.0] * 4, [0.3, -0.2, 0.4, 0.1], [0.1, 0.8, -0.3, 0.2]]], dtype=torch.float64)
    slots = Noisy(z, estimate, torch.full((1, 3), sigma), torch.ones(3, dtype=torch.bool))
    codes = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    for slot in range(3):
        variance = (1 - float(estimate[0, slot] @ estimate[0, slot])) / 4
        for k in range(4):
            prior, state = (codes - estimate[0, slot, k]) ** 2 / variance, (codes - z[0, slot, k]) ** 2 / sigma**2
            weight = (-(prior + state) / 2).softmax(0)
            assert float(slots.guess()[0, slot, k]) == pytest.approx(float(weight @ codes), abs=1e-6)


def test_a_sure_estimate_is_the_guess() -> None:
    sure = F.normalize(torch.randn(1, 3, 4), dim=2)
    slots = Noisy(torch.randn(1, 3, 4), sure, torch.full((1, 3), 0.5), torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(slots.guess(), sure, atol=1e-5, rtol=1e-5)


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


@pytest.fixture
def head() -> GraftHead:
    return GraftHead(torch.randn(50, 6), F.normalize(torch.randn(50, 4)), torch.randn(50))


def evidence(rows: int) -> StateLikelihood:
    return StateLikelihood(torch.randn(rows, 4), torch.rand(rows, 1) + 0.5)


@pytest.mark.parametrize("rows", [1, CPU_ROWS, 2 * CPU_ROWS + 3])
def test_losses_and_gradient_are_those_of_all_odds_at_once(head: GraftHead, rows: int) -> None:
    said, target, weights = evidence(rows), torch.randint(50, (rows,)), torch.rand(rows)
    ours = torch.randn(rows, 6, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    logits = theirs @ head.weight.T + head.bias + said.z @ head.codes.T / said.sigma**2
    expected = F.cross_entropy(logits, target, reduction="none")
    found = head_losses(head, ours, target, said)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert found.shape == (rows,)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(head.logits(ours, said), logits)
    torch.testing.assert_close(head.points(ours, said), logits.softmax(dim=1) @ head.codes)


def test_a_colder_point_is_nearer_to_the_likeliest_code(head: GraftHead) -> None:
    hidden, said = torch.randn(3, 6), evidence(3)
    best = head.codes[head.logits(hidden, said).argmax(dim=1)]
    torch.testing.assert_close(head.points(hidden, said, 1e-4), best)


def test_the_evidence_is_the_log_likelihood_up_to_a_constant(head: GraftHead) -> None:
    said = evidence(2)
    likelihood = -((said.z[:, None] - head.codes) ** 2).sum(dim=2) / (2 * said.sigma**2)
    difference = said.at(slice(0, 2), head.codes) - likelihood
    torch.testing.assert_close(difference, difference[:, :1].expand_as(difference), atol=1e-4, rtol=1e-4)
