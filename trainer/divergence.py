"""How far the drafter's next-byte odds are from a scorer's: what proposals are worth, before any host runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.ar import ArModel
from stages.bundle import find_bundle
from stages.checkpoint import load_ar
from trainer.data import Corpus
from trainer.diagnostics import ROWS

TEXT_BYTES = 256
"""Length for which sweeps are foretold."""


@dataclass(frozen=True)
class Divergence:
    """Means over the bytes of held-out text; q is the drafter, p the scorer, both at `temperature`."""

    drafter: str
    scorer: str
    temperature: float
    total_variation: float
    kl_bits: float
    """KL(p || q): about 2^(chunk * this) candidates stand for a chunk of the scorer's own text."""
    reverse_kl_bits: float
    """KL(q || p): what a byte of the drafter's text costs more under the scorer."""

    @property
    def verified_sweeps(self) -> float:
        """Sweeps that rejection sampling takes for 256 bytes: 1 + N TV."""
        return 1 + TEXT_BYTES * self.total_variation

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "verified_sweeps": self.verified_sweeps}


def bundle_divergences(
    directory: Path, corpus: Corpus, windows: int, min_context: int, temperature: float
) -> list[Divergence]:
    """The bundle's local model against each scorer in it; none where either is missing."""
    bundle = find_bundle(directory)
    scorers = {"ar": bundle.ar, "chain": bundle.scorer}
    if bundle.local is None:
        return []
    drafter = load_ar(bundle.local)
    return [
        divergence(drafter, load_ar(path), name, corpus, windows, min_context, temperature)
        for name, path in scorers.items()
        if path is not None
    ]


@torch.inference_mode()
def divergence(
    drafter: ArModel, scorer: ArModel, name: str, corpus: Corpus, windows: int, min_context: int, temperature: float
) -> Divergence:
    """On evenly spaced windows of validation text, past their first `min_context` bytes."""
    length = min(model.architecture.context_bytes for model in (drafter, scorer))
    corpus.require(length)
    text = corpus.valid_batch(min(windows, len(corpus.valid) // length), length)
    sums = torch.zeros(3, dtype=torch.float64)
    for part in text.split(ROWS):
        q, p = (_log_odds(model, part, min_context, temperature) for model in (drafter, scorer))
        sums += torch.stack(
            [0.5 * (p.exp() - q.exp()).abs().sum(), (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()]
        )
    tv, kl, reverse = (sums / (len(text) * (length - min_context))).tolist()
    return Divergence("local", name, temperature, tv, kl / math.log(2), reverse / math.log(2))


def _log_odds(model: ArModel, text: Tensor, min_context: int, temperature: float) -> Tensor:
    """(rows, positions, 256) float64."""
    return (model(text)[:, min_context:].double() / temperature).log_softmax(-1)
