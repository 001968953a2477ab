"""`lagged`: a local AR model reads the deep features that a sweep brought back, some bytes late."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.ar import ArModel
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.ideas.guided import Guide, GuidedLocal
from trainer.ideas.measure import Measured, mean_losses, window_nats
from trainer.objectives import next_byte_loss
from trainer.run import StepLoss


@torch.no_grad()
def deep_features(deep: ArModel, known: Tensor) -> Tensor:
    """What the deep model's head reads: (batch, positions, width) float32. Entry i has read the bytes up to i."""
    x = known
    for stage in deep.stages:
        x = stage.read(x)
    assert deep.stages[-1].norm is not None
    return deep.stages[-1].norm(x).float()


def lagged_guide(features: Tensor, lag: int) -> Guide:
    """Features (batch, positions, width) as the byte at t may read them: those of positions up to t - lag."""
    positions = torch.arange(features.shape[1])
    newest = positions + 1 - lag
    nearest = F.pad(features, (0, 0, lag - 1, 0))[:, : len(positions)]
    return Guide(features, positions[None, None, :] <= newest[None, :, None], nearest)


class LaggedTask:
    """The local model with features `lag` bytes old; without any at lag None, all else equal."""

    def __init__(
        self, name: str, model: GuidedLocal, deep: ArModel, lag: int | None, corpus: Corpus, config: TrainingConfig
    ) -> None:
        self.name, self.module, self.deep, self.lag = name, model, deep, lag
        self.corpus, self.config, self.trained = corpus, config, [model]
        self.length = config.architecture.context_bytes

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        loss = next_byte_loss(self._logits(text), text)
        return StepLoss(loss, {"next_byte_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        return mean_losses(self.measure(self.corpus.valid_batch(self.config.valid_windows, self.length + 1), 1))

    def measure(self, text: Tensor, skip: int) -> Measured:
        return {"next byte": window_nats(self._logits, text, skip)}

    def _logits(self, text: Tensor) -> Tensor:
        known = text[:, :-1]
        if self.lag is None:
            return self.module(known)
        return self.module(known, lagged_guide(deep_features(self.deep, known), self.lag))
