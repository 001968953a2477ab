"""Translations of features in the middle of a pretrained model into those at its end, by least squares.

What a middle block says at its end is read by the model's own head, which expects features of the end. A tuned lens
(arXiv 2303.08112) learns that translation by gradient; its best linear start is known in closed form, and saves most of
that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.families import PipelineStage
from trainer.least_squares import LeastSquares

ROWS = 4
"""Windows at a time."""


@torch.no_grad()
def fit_lenses(stages: Sequence[PipelineStage], text: Tensor) -> Tensor:
    """What is to be added to each stage's features: (stages, width, width + 1), a matrix and an offset. The last's: 0.

    Only the direction of the last features counts, for the head reads them through a norm: they are fitted at the mean
    length of the stage's own. text: (windows, length) int64, of which the first position is left out: models park
    features there that are like no others.
    """
    width, device = stages[0].architecture.width, text.device
    fits = [LeastSquares(width + 1, width, free=1, device=device) for _ in stages[:-1]]
    for part in text.split(ROWS):
        x, features = part, []
        for stage in stages:
            x = stage.read(x)
            features.append(x[:, 1:].flatten(0, 1).double())
        last = features[-1] / features[-1].norm(dim=1, keepdim=True)
        for fit, own in zip(fits, features, strict=False):
            known = torch.cat([own, own.new_ones(len(own), 1)], dim=1)
            fit.add(known, last * own.norm(dim=1, keepdim=True) - own)
    return torch.stack([*(fit.solve().T.float() for fit in fits), torch.zeros(width, width + 1, device=device)])
