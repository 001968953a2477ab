"""Masks and losses, against the rules written out and an independent float64 implementation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stages.model.block import Block
from tests.trainer.small import make_blocks, partition
from trainer.blocks.losses import MASKED, ChunkLayout, Corruption, block_loss

LENGTH = 12


def example(block: Block, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Text (batch, LENGTH + 1), noise levels and noise for LENGTH slots."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(256, (batch, LENGTH + 1), generator=generator)
    sigma = 0.3 + 2 * torch.rand(batch, LENGTH, generator=generator)
    return text, sigma, torch.randn(batch, LENGTH, block.architecture.code_dim, generator=generator)


# Masks


@pytest.mark.parametrize(("chunk", "offset"), [(1, 0), (4, 0), (4, 3), (5, 2), (LENGTH, 0), (LENGTH, 7), (64, 60)])
def test_mask_follows_the_rules(chunk: int, offset: int) -> None:
    layout = ChunkLayout(LENGTH, chunk, offset)
    mask, number = layout.mask(), [(i + offset) // chunk for i in range(LENGTH)]
    assert mask.shape == (LENGTH, 2 * LENGTH)
    for slot in range(LENGTH):
        start = number.index(number[slot])
        for position in range(LENGTH):
            assert (mask[slot, position] == 0) == (position < start), "clean positions before the chunk, and no others"
            own = number[slot] == number[position]
            assert (mask[slot, LENGTH + position] == 0) == own, "slots of the own chunk, both directions"
    assert set(mask.unique().tolist()) <= {0.0, MASKED}
    assert mask.isfinite().all()


# An independent float64 implementation: loops over positions, no masks


class Reference:
    def __init__(self, block: Block) -> None:
        self.block, self.a = block, block.architecture
        self.w = {name: value.detach().double().numpy() for name, value in block.state_dict().items()}
        self.codes = block.codes.double().numpy()

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.finfo(np.float32).eps) * self.w[name]

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = position * 10000.0 ** (-np.arange(half) / half)
        left, right = x[..., :half], x[..., half:]
        return np.concatenate(
            [left * np.cos(angle) - right * np.sin(angle), left * np.sin(angle) + right * np.cos(angle)], axis=-1
        )

    def projected(self, x: np.ndarray, layer: int, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, k, v = (self.w[f"layers.{layer}.qkv.weight"] @ x).reshape(3, self.a.heads, self.a.head_dim)
        return self.rotated(q, position), self.rotated(k, position), v

    def attended(self, q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
        out = []
        for head in range(self.a.heads):
            score = np.array([q[head] @ k[head] for k in keys]) / math.sqrt(self.a.head_dim)
            weight = np.exp(score - score.max())
            out.append(sum(w * v[head] for w, v in zip(weight / weight.sum(), values, strict=True)))
        return np.concatenate(out)

    def gelu(self, x: np.ndarray) -> np.ndarray:
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    def read(self, rows: list[np.ndarray]) -> tuple[list[np.ndarray], list[list[tuple[np.ndarray, np.ndarray]]]]:
        x, memory = list(rows), []
        for layer in range(self.a.layers):
            p = f"layers.{layer}."
            made = [self.projected(self.norm(row, p + "attention_norm.weight"), layer, i) for i, row in enumerate(x)]
            memory.append([(k, v) for _, k, v in made])
            for i, (q, _, _) in enumerate(made):
                mixed = self.attended(q, [k for _, k, _ in made[: i + 1]], [v for _, _, v in made[: i + 1]])
                x[i] = x[i] + self.w[p + "attention_out.weight"] @ mixed
                hidden = self.gelu(self.w[p + "mlp_in.weight"] @ self.norm(x[i], p + "mlp_norm.weight"))
                x[i] = x[i] + self.w[p + "mlp_out.weight"] @ hidden
        return x, memory

    def condition(self, sigma: float) -> np.ndarray:
        angle = math.log(sigma) / 4 * 2.0 ** np.linspace(-1, 5, 16)
        x = self.w["condition.project.weight"] @ np.concatenate([np.cos(angle), np.sin(angle)])
        x = x + self.w["condition.project.bias"]
        return x / (1 + np.exp(-x))

    def denoise(
        self, z: np.ndarray, estimate: np.ndarray, sigma: np.ndarray, memory: list, layout: ChunkLayout
    ) -> np.ndarray:
        std = self.a.code_dim**-0.5
        number = [(i + layout.offset) // layout.chunk for i in range(len(z))]
        x = [
            self.w["state_in.weight"] @ (z[i] / math.sqrt(sigma[i] ** 2 + std**2))
            + self.w["estimate_in.weight"] @ (estimate[i] / std)
            + self.w["slot"]
            for i in range(len(z))
        ]
        for layer in range(self.a.layers):
            p = f"layers.{layer}."
            made, modulation = [], []
            for i, row in enumerate(x):
                m = self.w[p + "modulation.weight"] @ self.condition(sigma[i]) + self.w[p + "modulation.bias"]
                modulation.append(m.reshape(6, -1))
                shift, scale, *_ = modulation[i]
                made.append(self.projected(self.norm(row, p + "attention_norm.weight") * (1 + scale) + shift, layer, i))
            for i in range(len(x)):
                seen = [memory[layer][j] for j in range(number.index(number[i]))]
                seen += [(k, v) for j, (_, k, v) in enumerate(made) if number[j] == number[i]]
                _, _, gate_a, shift, scale, gate_m = modulation[i]
                mixed = self.attended(made[i][0], [k for k, _ in seen], [v for _, v in seen])
                x[i] = x[i] + (1 + gate_a) * (self.w[p + "attention_out.weight"] @ mixed)
                inner = self.norm(x[i], p + "mlp_norm.weight") * (1 + scale) + shift
                hidden = self.gelu(self.w[p + "mlp_in.weight"] @ inner)
                x[i] = x[i] + (1 + gate_m) * (self.w[p + "mlp_out.weight"] @ hidden)
        logits = [
            self.w["noisy_head.weight"] @ self.norm(row, "noisy_norm.weight")
            + self.w["noisy_head.bias"]
            + self.codes @ z[i] / sigma[i] ** 2
            for i, row in enumerate(x)
        ]
        return np.array(logits)

    def cross_entropies(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        top = logits.max(-1, keepdims=True)
        return (top[:, 0] + np.log(np.exp(logits - top).sum(-1))) - logits[np.arange(len(target)), target]

    def losses(
        self,
        text: np.ndarray,
        rows: list[np.ndarray],
        sigma: np.ndarray,
        eps: np.ndarray,
        layout: ChunkLayout,
        sc: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """CE of each slot, CE of each next byte, for one sequence."""
        known = text[:-1]
        clean, memory = self.read(rows)
        z = self.codes[known] + sigma[:, None] * eps
        estimate = np.zeros_like(z)
        if sc:
            logits = self.denoise(z, estimate, sigma, memory, layout)
            share = np.exp(logits - logits.max(-1, keepdims=True))
            estimate = share / share.sum(-1, keepdims=True) @ self.codes
        slots = self.cross_entropies(self.denoise(z, estimate, sigma, memory, layout), known)
        heads = [
            self.w["clean_head.weight"] @ self.norm(row, "clean_norm.weight") + self.w["clean_head.bias"]
            for row in clean
        ]
        return slots, self.cross_entropies(np.array(heads), text[1:])


@pytest.mark.parametrize(("chunk", "offset", "self_condition"), [(1, 0, False), (4, 3, True), (LENGTH, 0, True)])
def test_the_block_loss_matches_an_independent_implementation(chunk: int, offset: int, self_condition: bool) -> None:
    block = make_blocks()[0]
    layout = ChunkLayout(LENGTH, chunk, offset)
    text, sigma, eps = example(block)
    denoise, next_byte = block_loss(block, text, layout, Corruption(sigma, eps), self_condition=self_condition)

    reference, slots, heads = Reference(block), [], []
    for i in range(2):
        source = list(reference.w["embedding.weight"][text[i, :-1].numpy()])
        numbers = (text[i].numpy(), source, sigma[i].double().numpy(), eps[i].double().numpy())
        slot, head = reference.losses(*numbers, layout, self_condition)
        slots.append(slot)
        heads.append(head)
    slots, heads = np.array(slots), np.array(heads)
    assert denoise.item() == pytest.approx(slots.mean(), rel=1e-4)
    assert next_byte.item() == pytest.approx(heads.mean(), rel=1e-4)


# Gradients


def test_the_loss_of_the_slots_trains_the_clean_stream() -> None:
    block: Any = make_blocks()[0]
    text, sigma, eps = example(block)
    layout = ChunkLayout(LENGTH, 4)
    denoise, _ = block_loss(block, text, layout, Corruption(sigma, eps), self_condition=True)
    denoise.backward()
    assert float(block.embedding.weight.grad.norm()) > 0, "slots see bytes only through the clean stream"
    assert block.clean_head.weight.grad is None


# Noise


def test_each_chunk_has_one_noise_level_within_the_widened_range() -> None:
    block, layout = make_blocks()[1], ChunkLayout(LENGTH, 4, 1)
    noise = Corruption.draw(block, partition, layout, 64, torch.Generator().manual_seed(0))
    assert noise.sigma.shape == (64, LENGTH)
    assert noise.eps.shape == (64, LENGTH, 8)
    index = layout.indices()
    for number in index.unique():
        assert noise.sigma[:, index == number].std(dim=1, correction=0).max() < 1e-6
    assert (noise.sigma[:, 0] != noise.sigma[:, -1]).all()
    high, low = partition.widened(1)
    assert low * (1 - 1e-6) <= float(noise.sigma.min())
    assert float(noise.sigma.max()) <= high * (1 + 1e-6)
