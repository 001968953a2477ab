"""One block: its streams do not leak into each other, and serving computes what was trained."""

import pytest
import torch
from torch import Tensor, nn

from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.pipeline import ArModel, new_caches
from stages.model.randomness import Codes, Purpose, normals
from tests.stages.conftest import make_block
from trainer.blocks.losses import ChunkLayout

TOLERANCE = 1e-4  # float32, sums in another order
LENGTH = 48


def text(batch: int = 1, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained_path(block: Block, known: Tensor, z: Tensor, estimate: Tensor, sigma: Tensor, chunk: int) -> Tensor:
    """Logits of all slots at once, as a training step computes them."""
    _, memory = block.read(known)
    return block.denoise(z, estimate, sigma, memory, 0, ChunkLayout(known.shape[1], chunk).mask())


# The clean stream
def test_a_batch_gives_the_results_of_its_sequences() -> None:
    block, known = make_block(), text(3)
    z, estimate, sigma = random(3, 8, 8), random(3, 8, 8, seed=2), torch.tensor([[0.3], [1.0], [5.0]])
    features, memory = block.read(known)
    logits = block.denoise(z, estimate, sigma, memory, LENGTH)
    for i in range(3):
        alone, its_memory = block.read(known[i : i + 1])
        its_logits = block.denoise(z[i : i + 1], estimate[i : i + 1], sigma[i : i + 1], its_memory, LENGTH)
        assert torch.allclose(features[i], alone[0], atol=TOLERANCE)
        assert torch.allclose(logits[i], its_logits[0], atol=TOLERANCE)


# Noisy slots
@pytest.mark.parametrize(("chunk", "which"), [(1, 30), (8, 3), (16, 1), (48, 0)])
def test_serving_computes_the_logits_of_training(chunk: int, which: int) -> None:
    """A chunk after a cached prefix, against the masked two-stream pass over the whole window."""
    block, known = make_block(1), text()
    z, estimate = random(1, LENGTH, 8), 0.3 * random(1, LENGTH, 8, seed=2)
    sigma = torch.full((1, LENGTH), 0.7)
    start = which * chunk
    slots = slice(start, start + chunk)
    trained = trained_path(block, known, z, estimate, sigma, chunk)[:, slots]
    held = new_caches(block.architecture.layers, block.architecture, LENGTH)
    for piece in known[:, :start].split(7, dim=1):
        block.read(piece, held)
    memory = [cache.stored() for cache in held]
    served = block.denoise(z[:, slots], estimate[:, slots], torch.full((1, 1), 0.7), memory, start)
    assert torch.allclose(served, trained, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 8, 20])
def test_slots_attend_to_earlier_bytes_and_their_own_chunk_only(chunk: int) -> None:
    block, known = make_block(), text()
    z, estimate, sigma = random(1, LENGTH, 8), torch.zeros(1, LENGTH, 8), torch.ones(1, LENGTH)
    index = ChunkLayout(LENGTH, chunk).indices()
    before = trained_path(block, known, z, estimate, sigma, chunk)

    def moved(now: Tensor) -> Tensor:
        return (now - before)[0].abs().amax(dim=-1) > 1e-6

    changed = known.clone()
    changed[:, 21] ^= 1
    assert torch.equal(moved(trained_path(block, changed, z, estimate, sigma, chunk)), index > index[21])
    shifted = z.clone()
    shifted[:, 21] += 1
    assert torch.equal(moved(trained_path(block, known, shifted, estimate, sigma, chunk)), index == index[21])


@pytest.mark.parametrize("sigma", [0.15, 0.5, 2.0, 10.0])
def test_without_output_of_the_layers_the_block_is_bayes_rule(sigma: float) -> None:
    """p(byte | z) of a uniform prior is proportional to exp(-|z - code|^2 / 2 sigma^2)."""
    block = make_block()
    torch.nn.init.zeros_(block.noisy_head.weight)
    torch.nn.init.zeros_(block.noisy_head.bias)
    _, memory = block.read(text())
    z = block.codes[text(length=16, seed=3)] + sigma * random(1, 16, 8)
    logits = block.denoise(z, torch.zeros_like(z), torch.full((1, 1), sigma), memory, LENGTH)
    squared = ((z[0].double()[:, None] - block.codes.double()) ** 2).sum(dim=-1)
    likelihood = torch.exp(-(squared - squared.amin(dim=1, keepdim=True)) / (2 * sigma**2))
    posterior = likelihood / likelihood.sum(dim=1, keepdim=True)
    assert torch.allclose(logits[0].softmax(dim=-1).double(), posterior, atol=1e-4)
    assert torch.allclose(block.point(logits)[0].double(), posterior @ block.codes.double(), atol=1e-4)


# The numbers that trained weights stand for
def filled(module: nn.Module) -> nn.Module:
    """Weights that depend on their name and no library's random numbers."""
    for name, parameter in sorted(module.state_dict().items()):
        drawn = normals(len(name), Purpose.TRAINING, sum(name.encode()), 1, parameter.numel()).view(parameter.shape)
        parameter.copy_(0.2 * drawn + (1.0 if "norm" in name else 0.0))
    return module.requires_grad_(False).eval()


def test_the_function_of_the_weights_is_frozen() -> None:
    """A change here makes every checkpoint that was ever trained mean something else."""
    a = Architecture(parts=2, layers=2, width=16, heads=2, context_length=32, code_dim=8, condition_dim=8)
    block, stage = filled(Block(a, 1, Codes(0, 8))), filled(ArModel(a))
    known = torch.tensor([list(b"The rider slept.")])
    features, memory = block.read(known)
    z = 0.9 * normals(0, Purpose.INITIAL_NOISE, 16, 4, 8)[None]
    logits = block.denoise(z, 0.3 * z, torch.full((1, 1), 0.9), memory, 16)
    assert block.next_byte(features)[0, -1, 96:101].tolist() == pytest.approx(FROZEN_NEXT_BYTE, abs=1e-3)
    assert logits[0, -1, 96:101].tolist() == pytest.approx(FROZEN_DENOISE, abs=1e-3)
    assert stage(known)[0, -1, 96:101].tolist() == pytest.approx(FROZEN_AR, abs=1e-3)


FROZEN_NEXT_BYTE = [-0.60744, 0.91461, -0.17176, 0.37455, 0.0359]
FROZEN_DENOISE = [-0.03125, -1.83545, 2.45164, -0.86456, -0.62947]
FROZEN_AR = [0.6681, -0.41517, -0.8372, -0.20594, -1.06859]


# The tensors of a block
def test_an_untrained_block_is_nearly_uniform_and_ignores_the_noise_level() -> None:
    torch.manual_seed(0)
    block = Block(Architecture(width=32, heads=2, code_dim=8, condition_dim=16), 0, Codes(0, 8)).requires_grad_(False)
    x, memory = block.read(text())
    assert float(block.next_byte(x).std()) < 0.5
    rotary, zero = block.rotary[:, :4], torch.zeros(1, 1, 16)
    keys, values = memory[0]
    slots = random(1, 4, 32)
    modulated = block.layers[0].noisy(slots, zero + 3, rotary, keys, values)
    assert torch.equal(modulated, block.layers[0].noisy(slots, zero, rotary, keys, values))


def test_tables_are_restored_and_not_stored() -> None:
    block = make_block()
    assert not {"codes", "rotary", "condition.frequencies"} & block.state_dict().keys()
    before = [tensor.clone() for tensor in (block.codes, block.rotary, block.condition.frequencies)]
    with torch.device("meta"):
        empty = Block(block.architecture, 0, Codes(0, 8))
    empty.restore_tables()
    after = [empty.codes, empty.rotary, empty.condition.frequencies]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
