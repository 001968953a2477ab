"""Stages of one pipeline, each trained alone: its loss is the last head's, through frozen copies of the others."""

# A worker holds gradients and optimizer state of one stage. It reads the features that the stages before it send, and
# has copies of the stages after it that are refreshed now and then. With copies that are always fresh,
# every worker's gradient is that of end-to-end training; the copies' age is all that is lost.
# A scorer is a pipeline of its own rather than the chain's clean stream: trained with noisy slots in the same blocks it
# is 0.13 bits a byte worse for the same budget, and a second set of weights costs a host 1.8 MB.

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from stages.model.architecture import Architecture
from stages.model.layers import initialise
from stages.model.pipeline import ArStage
from trainer.blocks.config import Copies, LookaheadConfig, TrainingConfig
from trainer.blocks.data import Corpus
from trainer.blocks.losses import next_byte_loss, next_byte_nats
from trainer.blocks.run import StepLoss

INT8_LEVELS = 127


class OwnHead(nn.Module):
    """A stage's own next-byte head. Only training uses it."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.norm, self.head = nn.RMSNorm(a.width), nn.Linear(a.width, a.vocabulary)
        initialise(self, a.layers * a.parts)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (batch, positions, 256) from a stage's hidden states (batch, positions, width)."""
        return self.head(self.norm(hidden))


class StagesInOneProcess(nn.Module):
    """The stages in training and their copies of each other, as if each were on a machine of its own."""

    stages: Sequence[ArStage]
    heads: Sequence[OwnHead]
    copies: Sequence[ArStage]

    def __init__(self, architecture: Architecture, config: LookaheadConfig) -> None:
        super().__init__()
        self.config = config
        stages = [ArStage(architecture, i) for i in range(architecture.parts)]
        heads = [OwnHead(architecture) for _ in stages[:-1]]
        self.stages = cast(Sequence[ArStage], nn.ModuleList(stages))
        self.heads = cast(Sequence[OwnHead], nn.ModuleList(heads))
        copies = nn.ModuleList(copy.deepcopy(stage) for stage in stages)
        self.copies = cast(Sequence[ArStage], copies.requires_grad_(False))

    def refresh(self) -> None:
        """Give every worker the others' stages as they are now."""
        for stage, frozen in zip(self.stages, self.copies, strict=True):
            copy_parameters(stage, frozen, self.config.copies)

    def losses(self, text: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Sum of the workers' objectives, no parameter in more than one of them, and each stage's own loss in nats.

        text: (batch, length + 1) int64. The last stage's own loss is its objective.
        """
        x, total, own = text[:, :-1], torch.zeros(()), []
        for index, stage in enumerate(self.stages):
            hidden = stage.read(x)
            if stage.is_last:
                own.append(next_byte_loss(stage.next_byte(hidden), text))
                return total + own[-1], own
            objective, nats = stage_losses(self.heads[index], self.copies[index + 1 :], hidden, text)
            own.append(nats)
            total = total + objective
            # Detached: no gradient crosses from one stage's worker to another. Live, not of copies: stale copies of
            # later stages only steer a gradient, stale features are an input that the served stage never sees again
            # (3.18 bits a byte in place of 2.75 in a short trial).
            x = hidden.detach()
        raise AssertionError("a pipeline has a last stage")


def stage_losses(head: OwnHead, later: Sequence[ArStage], hidden: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Objective of a stage that is not the last, and its own head's loss in nats.

    later: frozen copies of the stages after it; hidden: (batch, length, width), what it passes on.
    """
    # Its head learns, and the stage learns nothing from it. With fresh copies that is the gradient of end-to-end
    # training; a loss of its own would pull each stage towards another aim.
    own, ahead = next_byte_loss(head(hidden.detach()), text), hidden
    for frozen in later:
        ahead = frozen.read(ahead)
    return own + next_byte_loss(later[-1].next_byte(ahead), text), own


class ScorerTask:
    """All workers of a scorer in one process. They share batches, and nothing else but the copies."""

    def __init__(self, name: str, workers: StagesInOneProcess, corpus: Corpus, config: TrainingConfig) -> None:
        self.name, self.module, self.corpus, self.config = name, workers, corpus, config
        self.trained = [nn.ModuleList([stage, *workers.heads[i : i + 1]]) for i, stage in enumerate(workers.stages)]
        self.length = workers.stages[0].architecture.context_length

    def loss(self, step: int) -> StepLoss:
        if step % self.config.lookahead.refresh_every == 0:
            self.module.refresh()
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        total, own = self.module.losses(text)
        parts = {f"stage_{i}_nats": float(nats.detach()) for i, nats in enumerate(own[:-1])}
        return StepLoss(total, {**parts, "next_byte_nats": float(own[-1].detach())})

    def evaluate(self) -> dict[str, float]:
        """Losses of the pipeline as it is served, on validation text: of its end, and of each stage's own head."""
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        x, losses = text[:, :-1], dict[str, float]()
        for i, stage in enumerate(self.module.stages):
            x = stage.read(x)
            logits = stage.next_byte(x) if stage.is_last else self.module.heads[i](x)
            name = "valid_next_byte" if stage.is_last else f"valid_stage_{i}"
            nats = next_byte_nats(logits, text)
            losses |= {f"{name}_nats": nats, f"{name}_bits": self.corpus.bits(nats, text[:, 1:])}
        return losses


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module, how: Copies) -> None:
    """Copy a part's weights as they arrive over a network: in int8 its matrices lose some precision."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        # Vectors travel in fp32: they are few bytes, and norms are sensitive.
        theirs.copy_(_through_int8(ours) if how == "int8" and ours.dim() > 1 else ours)


def _through_int8(weight: Tensor) -> Tensor:
    """A matrix as it arrives when its rows travel as int8 with one scale each."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / INT8_LEVELS
    return (weight / scale).round() * scale
