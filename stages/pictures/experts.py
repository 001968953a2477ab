"""Experts: nets that learned one cluster of pictures each, and the router net that says which of them a state needs.

Decentralized diffusion models (arXiv 2501.05450): where p(k | z, sigma, class) is the probability that a noisy picture
comes from cluster k, the denoised picture of all data is the sum of p(k) D_k over the experts' own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from onesweep.stages.pictures.architecture import PictureArchitecture
from onesweep.stages.pictures.part import PicturePart, normed


class RouterNet(nn.Module):
    """Layers of a small DiT, the mean over the patches, and a logit for each cluster."""

    def __init__(self, architecture: PictureArchitecture, experts: int) -> None:
        """:param architecture: that of the experts: patches, classes and width are theirs.
        :param experts: clusters; as many as the architecture has parts, unless these share noise ranges.
        """
        super().__init__()
        self.architecture, self.experts = architecture, experts
        self.index = architecture.parts  # its file comes after those of the experts
        # The first of two stages has a way in and no head. One layer: at low noise a picture's shape is enough, and at
        # high noise there is nothing to see but the class.
        self.trunk = PicturePart(replace(architecture, parts=2, layers=1), 0, "steps")
        self.head = nn.Linear(architecture.features, experts)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def restore_tables(self) -> None:
        """Compute what is not stored, as `PicturePart` does."""
        self.trunk.restore_tables()

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> Tensor:
        """Logits (pictures, experts). x: c_in z (pictures, tokens, patch_dim); sigma, classes: (pictures,)."""
        logits: Tensor = self.head(normed(self.trunk(x, sigma, classes)).mean(1))
        return logits

    def posterior(self, x: Tensor, sigma: float, classes: Tensor) -> Tensor:
        """p(k | z, sigma, class): (pictures, experts)."""
        return self(x, torch.full((len(x),), sigma), classes).softmax(-1)
