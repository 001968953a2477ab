"""The optimizers of a graft."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import TrainingConfig
from trainer.optimizer import BETAS, OptimizerSet

PRETRAINED = "pretrained"
"""What a graft's module calls those of its parts that have learnt before."""


class GraftOptimizers(OptimizerSet):
    """AdamW for all: pretrained weights at the rate of matrices, what is added to them at the other."""

    def __init__(self, module: nn.Module, config: TrainingConfig) -> None:
        pretrained = [p for name, p in module.named_parameters() if name.startswith(f"{PRETRAINED}.")]
        known = {id(p) for p in pretrained}
        added = [p for p in module.parameters() if id(p) not in known]
        groups = [
            (group, rate)
            for group, rate in ((added, config.learning_rate), (pretrained, config.matrix_learning_rate))
            if group
        ]
        self.config, self.peaks = config, tuple(rate for _, rate in groups)
        self.optimizers = [
            torch.optim.AdamW(group, lr=rate, betas=BETAS, weight_decay=config.weight_decay) for group, rate in groups
        ]
