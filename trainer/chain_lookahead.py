"""Blocks of a `chained` chain, each trained alone with lookahead: see trainer/lookahead.py.

A block learns to denoise its own noise range, as ever. What its clean stream learns from is the last block's next-byte
head, through frozen copies of the later blocks, instead of its own head alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from stages.block import Block
from stages.codes import Codes
from stages.partition import NoisePartition
from trainer.config import Copies, TrainingConfig
from trainer.data import Corpus
from trainer.diagnostics import chain_diagnostics
from trainer.evaluation import bits, clean_features, next_byte_nats
from trainer.lookahead import copy_parameters
from trainer.objectives import BlockLoss, next_byte_loss
from trainer.run import StepLoss
from trainer.tasks import STEPS_PER_BLOCK, Lesson


class BlockWorkers(nn.Module):
    """The blocks in training and the copies that they see of each other."""

    blocks: Sequence[Block]
    copies: Sequence[Block]

    def __init__(self, config: TrainingConfig, codes: Codes) -> None:
        super().__init__()
        blocks = []
        for index in range(config.architecture.parts):
            torch.manual_seed(config.seed + index)  # as where they are trained one after the other
            blocks.append(Block(config.architecture, index, codes))
        self.blocks = cast(Sequence[Block], nn.ModuleList(blocks))
        copies = nn.ModuleList(copy.deepcopy(block) for block in blocks)
        self.copies = cast(Sequence[Block], copies.requires_grad_(False))

    def refresh(self, how: Copies) -> None:
        """Give every worker the others' blocks as they are now."""
        for block, frozen in zip(self.blocks, self.copies, strict=True):
            copy_parameters(block, frozen, how)


def ahead_loss(
    block: Block, later: Sequence[Block], lesson: Lesson, text: Tensor, features: Tensor | None, config: TrainingConfig
) -> tuple[Tensor, BlockLoss]:
    """A block's objective, and the losses of its own streams.

    later: frozen copies of the blocks after it, none for the last; features: what it reads instead of bytes.
    """
    own = config.anchor * (config.lookahead.own_weight if later else 1.0)
    loss = lesson.loss(block, text, features, config, own)
    if not later:
        return loss.total, loss
    ahead = loss.clean
    for frozen in later:
        ahead, _ = frozen.read(ahead)
    total = loss.total + config.anchor * next_byte_loss(later[-1].next_byte(ahead), text)
    if not config.lookahead.own_weight:  # the head still learns, from what it may not change
        total = total + next_byte_loss(block.next_byte(loss.clean.detach()), text)
    return total, loss


class ChainTask:
    """All workers of a chain in one process. They share batches, and nothing else but the copies."""

    def __init__(
        self, name: str, workers: BlockWorkers, partition: NoisePartition, corpus: Corpus, config: TrainingConfig
    ) -> None:
        self.name, self.module, self.partition = name, workers, partition
        self.corpus, self.config = corpus, config
        self.trained = list(workers.blocks)
        self.length = config.architecture.context_bytes

    def loss(self, step: int) -> StepLoss:
        config, workers = self.config, self.module
        if step % config.lookahead.refresh_every == 0:
            workers.refresh(config.lookahead.copies)
        text = self.corpus.batch(config.seed, step, config.sequences, self.length + 1)
        total, parts, features = torch.zeros(()), dict[str, float](), None
        for index, block in enumerate(workers.blocks):
            lesson = Lesson.draw(block, self.partition, config, step, len(text))
            objective, loss = ahead_loss(block, workers.copies[index + 1 :], lesson, text, features, config)
            total = total + objective
            parts |= {f"block_{index}_denoise_nats": float(loss.denoise)}
            parts |= {f"block_{index}_next_byte_nats": float(loss.next_byte.detach())}
            if config.lookahead.features == "live":
                features = loss.clean.detach()
            else:
                features, _ = workers.copies[index].read(text[:, :-1] if features is None else features)
        return StepLoss(total, parts)

    def evaluate(self) -> dict[str, float]:
        """Losses of the chain as it is served, on validation text."""
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        blocks = list(self.module.blocks)
        losses = dict[str, float]()
        for block, (features, _) in zip(blocks, clean_features(blocks, text[:, :-1]), strict=True):
            nats = next_byte_nats(block.next_byte(features), text)
            losses |= {f"valid_block_{block.index}_nats": nats, f"valid_block_{block.index}_bits": bits(nats)}
        chain = chain_diagnostics(blocks, self.partition, text, STEPS_PER_BLOCK)
        return losses | {f"valid_{name}": nats for name, nats in chain.items()}
