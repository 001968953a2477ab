"""Training tasks: one block of a chain, an AR model end to end, or a scorer stage by stage."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.layers import listed
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel, ArStage
from stages.model.randomness import Purpose, uniforms
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.blocks.losses import ChunkLayout, Corruption, block_loss, chain_diagnostics, next_byte_loss, next_byte_nats
from trainer.blocks.run import StepLoss

STEPS_PER_BLOCK = 4  # Euler steps of the diagnostics


class BlockTask:
    """One block, trained without the others."""

    def __init__(self, block: Block, partition: NoisePartition, corpus: Corpus, config: TrainingConfig) -> None:
        self.name = f"block-{block.index}"
        self.module, self.partition = block.to(corpus.device), partition
        self.corpus, self.config = corpus, config
        self.length = block.architecture.context_length
        self.trained = [block]

    def loss(self, step: int) -> StepLoss:
        config, block = self.config, self.module
        text = self.corpus.batch(config.seed, step, config.sequences, self.length + 1)
        # Four draws per step: the noise's seed, the chunk size, its offset, and whether the block gets its own guess.
        draws = uniforms(config.seed, Purpose.TRAINING, 1 + block.index, 1, 4, step)[0]
        chunk = config.chunks[int(draws[1] * len(config.chunks)) % len(config.chunks)] or self.length
        layout = ChunkLayout(self.length, chunk, int(draws[2] * chunk) % chunk)
        generator = torch.Generator().manual_seed(int(draws[0] * 2**53))
        corruption = Corruption.draw(block, self.partition, layout, len(text), generator)
        guess = bool(draws[3] <= config.self_condition)
        denoise, next_byte = block_loss(block, text, layout, corruption, self_condition=guess)
        parts = {"denoise_nats": denoise.item(), "next_byte_nats": next_byte.item(), "chunk": chunk}
        return StepLoss(denoise + config.anchor * next_byte, parts)

    def evaluate(self) -> dict[str, float]:
        """Validation losses of this block alone; denoising starts at its own sigma_max."""
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        next_byte = next_byte_nats(self.module.predict(text[:, :-1]), text)
        losses = chain_diagnostics([self.module], self.partition, text, STEPS_PER_BLOCK)
        return {
            "valid_next_byte_nats": next_byte,
            "valid_next_byte_bits": self.corpus.bits(next_byte, text[:, 1:]),
            **{f"valid_{name}": nats for name, nats in losses.items()},
        }


class ArTask:
    """An AR model, all of its stages at once."""

    name = "ar"

    def __init__(self, model: ArModel, corpus: Corpus, config: TrainingConfig) -> None:
        self.module, self.corpus, self.config = model.to(corpus.device), corpus, config
        self.length = model.architecture.context_length
        self.trained: list[nn.Module] = [model]

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        loss = next_byte_loss(self.module(text[:, :-1]), text)
        return StepLoss(loss, {"next_byte_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        nats = next_byte_nats(self.module(text[:, :-1]), text)
        return {"valid_next_byte_nats": nats, "valid_next_byte_bits": self.corpus.bits(nats, text[:, 1:])}


# A scorer is trained stage by stage: a worker reads the features from earlier stages and has frozen copies of the later
# stages, refreshed now and then. Only the copies' age makes this worse than end-to-end training.


class StagesInOneProcess(ArModel):
    """The stages in training and their copies of each other, as if each were on its own machine."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.copies = listed(copy.deepcopy(stage).requires_grad_(False) for stage in self.stages)

    def refresh(self) -> None:
        """Give every worker the others' current stages."""
        for stage, frozen in zip(self.stages, self.copies, strict=True):
            frozen.load_state_dict(stage.state_dict())

    def losses(self, text: Tensor) -> list[Tensor]:
        """Each worker's objective, in nats; no parameter is in more than one. text: (batch, length + 1) int64."""
        x, found = text[:, :-1], list[Tensor]()
        for index, stage in enumerate(self.stages):
            hidden = stage.read(x)
            found.append(stage_loss(stage, self.copies[index + 1 :], hidden, text))
            # Detached: no gradient crosses from one stage's worker to another. From the live stage, not from copies:
            # stale features are an input that the served stage never sees.
            x = hidden.detach()
        return found


def stage_loss(stage: ArStage, later: Sequence[ArStage], hidden: Tensor, text: Tensor) -> Tensor:
    """Objective of a stage: the last head's loss. With fresh copies its gradient is that of end-to-end training; a loss
    of its own head would pull each stage towards another goal.

    later: frozen copies of the later stages; hidden: (batch, length, width), the stage's output.
    """
    for frozen in later:
        hidden = frozen.read(hidden)
    return next_byte_loss((later or [stage])[-1].next_byte(hidden), text)


class ScorerTask(ArTask):
    """All workers of a scorer in one process, which share only batches and copies."""

    name = "scorer"
    module: StagesInOneProcess

    def __init__(self, workers: StagesInOneProcess, corpus: Corpus, config: TrainingConfig) -> None:
        super().__init__(workers, corpus, config)
        self.trained = [*workers.stages]

    def loss(self, step: int) -> StepLoss:
        if step % self.config.lookahead.refresh_every == 0:
            self.module.refresh()
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        losses = self.module.losses(text)
        return StepLoss(torch.stack(losses).sum(), {"next_byte_nats": float(losses[-1].detach())})
