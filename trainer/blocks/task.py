"""Training tasks: one block of a chain, or an AR model end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel
from stages.model.randomness import Purpose, uniforms
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.blocks.losses import (
    BlockLoss,
    ChunkLayout,
    Corruption,
    block_loss,
    chain_diagnostics,
    next_byte_loss,
    next_byte_nats,
)
from trainer.blocks.run import StepLoss

STEPS_PER_BLOCK = 4  # Euler steps with which the diagnostics denoise


def draw_chunks(
    config: TrainingConfig, index: int, length: int, step: int
) -> tuple[ChunkLayout, torch.Generator, bool]:
    """Chunks of block `index` in one step, the generator of its noise, and whether it sees an estimate."""
    # Four draws a step: the noise's seed, the chunk size, its offset, and whether the block sees its own guess.
    draws = uniforms(config.seed, Purpose.TRAINING, 1 + index, 1, 4, step)[0]
    chunk = config.chunks[int(draws[1] * len(config.chunks)) % len(config.chunks)] or length
    layout = ChunkLayout(length, chunk, int(draws[2] * chunk) % chunk)
    return layout, torch.Generator().manual_seed(int(draws[0] * 2**53)), bool(draws[3] <= config.self_condition)


@dataclass(frozen=True)
class BlockBatch:
    """The chunks and noise of one block in one step: a pure function of (seed, block, step)."""

    layout: ChunkLayout
    corruption: Corruption
    self_condition: bool

    @classmethod
    def draw(cls, block: Block, partition: NoisePartition, config: TrainingConfig, step: int, batch: int) -> BlockBatch:
        layout, generator, self_condition = draw_chunks(config, block.index, block.architecture.context_length, step)
        return cls(layout, Corruption.draw(block, partition, layout, batch, generator), self_condition)

    def loss(self, block: Block, text: Tensor, anchor: float) -> BlockLoss:
        found = self.layout, self.corruption
        return block_loss(block, text, *found, self_condition=self.self_condition, anchor=anchor)


class BlockTask:
    """One block, which needs no other."""

    def __init__(self, block: Block, partition: NoisePartition, corpus: Corpus, config: TrainingConfig) -> None:
        self.name = f"block-{block.index}"
        self.module, self.partition = block, partition
        self.corpus, self.config = corpus, config
        self.length = block.architecture.context_length
        self.trained = [block]

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        batch = BlockBatch.draw(self.module, self.partition, self.config, step, len(text))
        loss = batch.loss(self.module, text, self.config.anchor)
        return StepLoss(
            loss.total,
            {
                "denoise_nats": float(loss.denoise),
                "next_byte_nats": float(loss.next_byte.detach()),
                "chunk": batch.layout.chunk,
            },
        )

    def evaluate(self) -> dict[str, float]:
        """Validation losses of this block alone; those from noise start at its own sigma_max."""
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        clean, _ = self.module.read(text[:, :-1])
        next_byte = next_byte_nats(self.module.next_byte(clean), text)
        losses = chain_diagnostics([self.module], self.partition, text, STEPS_PER_BLOCK)
        return {
            "valid_next_byte_nats": next_byte,
            "valid_next_byte_bits": self.corpus.bits(next_byte, text[:, 1:]),
            **{f"valid_{name}": nats for name, nats in losses.items()},
        }


class ArTask:
    """An AR model, all of its stages at once."""

    def __init__(self, name: str, model: ArModel, corpus: Corpus, config: TrainingConfig) -> None:
        self.name, self.module, self.corpus, self.config = name, model, corpus, config
        self.length = model.architecture.context_length
        self.trained = [model]

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        loss = next_byte_loss(self.module(text[:, :-1]), text)
        return StepLoss(loss, {"next_byte_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        nats = next_byte_nats(self.module(text[:, :-1]), text)
        return {"valid_next_byte_nats": nats, "valid_next_byte_bits": self.corpus.bits(nats, text[:, 1:])}
