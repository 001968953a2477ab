"""One grafted block in training; the blocks before it run forward only, the stages after it are frozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.grafting.slots import WayOut
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.grafting.lesson import Lesson, read, slot_losses
from trainer.grafting.losses import losses
from trainer.grafting.measure import next_nats, range_nats
from trainer.grafting.model import GraftModel
from trainer.grafting.optimizers import PRETRAINED
from trainer.grafting.settings import GraftSettings
from trainer.run import StepLoss


class GraftTask:
    """`module` is what is trained, and nothing else: a state or a checkpoint of it holds no frozen weight."""

    def __init__(self, model: GraftModel, corpus: Corpus, config: TrainingConfig, settings: GraftSettings) -> None:
        self.model, self.corpus, self.config, self.settings = model, corpus, config, settings
        self.block = model.blocks[settings.block]
        self.name = f"graft-{settings.block}"
        self.length = config.architecture.context_bytes
        self.own_head = self._own_head()
        self.module = trained_module(model, settings, self.own_head)
        self.module.requires_grad_(True)
        self.trained = [self.module]

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        lesson = Lesson.draw(self.block.index, self.model.partition, self.config, step, len(text), self.model.device)
        before = self.model.blocks[: self.block.index]
        reading = read(self.block, before, text[:, :-1])
        total = slot_losses(self.block, before, self.model.head, lesson, reading, text[:, 1:]).mean()
        parts: dict[str, float | Tensor] = {"denoise_nats": total.detach(), "chunk": lesson.chunk}
        if self.settings.trains == "block" and self.config.anchor:
            anchor = self._anchor(reading.clean, text[:, 1:])
            parts["next_nats"] = anchor.detach()
            total = total + self.config.anchor * anchor
        return StepLoss(total, parts)

    def evaluate(self) -> dict[str, float]:
        """On validation text: the next-token loss of the whole pipeline with this block in its place, and the loss of
        its slots at both ends and in the middle of its noise range."""
        text = self.corpus.valid_batch(self.config.valid_windows, self.length + 1)
        losses = {"valid_next_nats": next_nats(self.model, text)}
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.config.bfloat16):
            found = range_nats(self.model, self.block.index, text)
        return losses | {f"valid_{name}": nats for name, nats in found.items()}

    def _anchor(self, clean: Tensor, target: Tensor) -> Tensor:
        if self.own_head is not None:
            hidden = self.own_head(clean)
        else:
            for stage in self.model.stages[self.block.index + 1 :]:
                clean = stage.read(clean)
            hidden = self.model.final_norm(clean)
        return losses(self.model.head, hidden.flatten(0, 1), target.flatten()).mean()

    def _own_head(self) -> WayOut | None:
        """Of a block that is not the last and whose anchor is at its own end."""
        if self.settings.anchor_head == "last" or self.block.stage.is_last:
            return None
        norm = self.model.stages[-1].norm
        assert norm is not None
        own = WayOut(norm.normalized_shape[0], norm.eps)
        own.norm.load_state_dict(norm.state_dict())
        return own.to(self.model.device)


def trained_module(model: GraftModel, settings: GraftSettings, own_head: WayOut | None = None) -> nn.Module:
    """What a block's file holds: the slots' own weights, and the pretrained ones where those are trained."""
    block = model.blocks[settings.block]
    parts: dict[str, nn.Module] = {"slots": block.added}
    if settings.trains == "block":
        layers: Sequence[nn.Module] = block.stage.layers
        final = [block.stage.norm] if block.stage.norm is not None else []
        parts[PRETRAINED] = nn.ModuleList([*layers, *final])
    if own_head is not None:
        parts["own_head"] = own_head
    return nn.ModuleDict(parts)
