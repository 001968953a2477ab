"""`planned`: a local AR model writes a chunk beside the chain's plan of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from stages.randomness import Purpose, uniforms
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.ideas.guided import Guide, GuidedLocal
from trainer.ideas.measure import Measured, mean_losses, window_nats
from trainer.ideas.planning import Planner
from trainer.objectives import ChunkLayout, next_byte_loss
from trainer.run import StepLoss

UNPLANNED_SHARE = 0.25
"""Chunks that are written without a plan in training: a prompt has none."""


def planned_guide(plan: Tensor, layout: ChunkLayout, has_plan: Tensor) -> Guide:
    """A plan (batch, length + 1, dim) as the bytes 1 to length read it: each its own chunk's slots, in both directions.

    has_plan: bool (batch, length + 1), the same for all slots of a chunk.
    """
    index = layout.indices()
    same = index[None, :] == index[1:, None]
    plan = plan * has_plan[..., None]
    return Guide(plan, same[None] & has_plan[:, None, :], plan[:, 1:])


class PlannedTask:
    """The local model beside plans of true text, noised to each of `sigmas` in turn; without any, all else equal.

    Noise that never saw the text says nothing of it, so plans rolled from pure noise would only teach the model to
    look away. It learns on chunks of true text that were truly noised.
    """

    def __init__(
        self,
        name: str,
        model: GuidedLocal,
        planner: Planner,
        sigmas: Sequence[float],
        chunk: int,
        rolled: float,
        corpus: Corpus,
        config: TrainingConfig,
    ) -> None:
        """:param sigmas: where plans end; none to train without plans."""
        self.name, self.module, self.planner = name, model, planner
        self.sigmas, self.chunk, self.rolled = tuple(sigmas), chunk, rolled
        self.corpus, self.config, self.trained = corpus, config, [model]
        self.length = config.architecture.context_bytes

    def loss(self, step: int) -> StepLoss:
        config = self.config
        text = self.corpus.batch(config.seed, step, config.sequences, self.length + 1)
        if not self.sigmas:
            loss = next_byte_loss(self.module(text[:, :-1]), text)
            return StepLoss(loss, {"next_byte_nats": float(loss.detach())})
        draws = uniforms(config.seed, Purpose.TRAINING, 0, 1, 3, step)[0]
        sigma = self.sigmas[int(draws[0] * len(self.sigmas)) % len(self.sigmas)]
        layout = ChunkLayout(self.length + 1, self.chunk, int(draws[1] * self.chunk) % self.chunk)
        generator = torch.Generator().manual_seed(int(draws[2] * 2**53))
        index = layout.indices()
        has_plan = (torch.rand(len(text), int(index[-1]) + 1, generator=generator) >= UNPLANNED_SHARE)[:, index]
        loss = next_byte_loss(self._logits(text, layout, sigma, has_plan, generator), text)
        return StepLoss(loss, {"next_byte_nats": float(loss.detach()), "sigma_end": sigma})

    def evaluate(self) -> dict[str, float]:
        return mean_losses(self.measure(self.corpus.valid_batch(self.config.valid_windows, self.length + 1), 1))

    def measure(self, text: Tensor, skip: int) -> Measured:
        """Told nothing, and told plans of each sigma_end; the same noise for all."""
        measured = {"no plan": window_nats(lambda part: self.module(part[:, :-1]), text, skip)}
        for sigma in self.sigmas:
            # one stream over all rows
            generator = torch.Generator().manual_seed(self.config.seed)
            measured[f"sigma {sigma:g}"] = window_nats(
                partial(self._planned, sigma=sigma, generator=generator), text, skip
            )
        return measured

    def _planned(self, text: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        layout = ChunkLayout(self.length + 1, self.chunk)
        return self._logits(text, layout, sigma, torch.ones(text.shape, dtype=torch.bool), generator)

    def _logits(
        self, text: Tensor, layout: ChunkLayout, sigma: float, has_plan: Tensor, generator: torch.Generator
    ) -> Tensor:
        dim = self.planner.blocks[0].architecture.code_dim
        eps = torch.randn(*text.shape, dim, generator=generator)
        plan = self.planner.of_text(text, layout, sigma, self.rolled, eps).float() * self.planner.scale
        return self.module(text[:, :-1], planned_guide(plan, layout, has_plan))
