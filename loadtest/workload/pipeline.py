"""The AR pipeline of a checkpoint in this process: what its hosts compute, without hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import read_manifest
from stages.model.codec import FEATURE_LIMIT, hidden_codec
from stages.model.layers import LayerCache
from stages.model.pipeline import new_caches
from stages.model.prefill import split_reads


@dataclass(frozen=True)
class Surprise:
    """Surprise of a model at a text, summed over its symbols."""

    nats: float  # -ln of its probability
    expected: float  # what the model expected that to be, place by place: the entropy of its odds there, nats


class Pipeline:
    """All stages, on one thread."""

    def __init__(self, directory: Path, backend: str = DEFAULT_BACKEND, codec: str = "fp32") -> None:
        """Load and gate the weights. Raises OnesweepError.

        :param codec: of hidden states between stages.
        """
        self.architecture, maker = read_manifest(directory).architecture, backend_named(backend)
        self.stages = [maker.stage(load_stage(directory, i)) for i in range(self.architecture.parts)]
        self.codec = hidden_codec(codec)

    def open(self, capacity: int) -> list[list[LayerCache]]:
        """Caches of every stage, for a text of so many symbols."""
        a = self.architecture
        return [new_caches(a.layers_in(i), a, capacity) for i in range(a.parts)]

    @torch.inference_mode()
    def logits(self, symbols: Sequence[int], caches: list[list[LayerCache]]) -> Tensor:
        """Read on: (symbols, vocabulary) float32, of what follows each of them."""
        found = []
        for piece in split_reads(torch.tensor(symbols)):
            x = piece
            for index, (stage, held) in enumerate(zip(self.stages, caches, strict=True)):
                x = self.codec.round_trip(x, FEATURE_LIMIT) if index else x
                (x,) = stage.read([CleanPiece(x, held)])
            found += self.stages[-1].next_byte([x])
        return torch.cat(found)

    def surprise(self, before: Sequence[int], text: Sequence[int]) -> Surprise:
        """Surprise at `text` after `before`, which has at least one symbol."""
        if not text:
            return Surprise(0.0, 0.0)
        logits = self.logits([*before, *text[:-1]], self.open(len(before) + len(text) - 1))
        told = F.log_softmax(logits[len(before) - 1 :].double(), dim=1)
        nats = F.nll_loss(told, torch.tensor(text), reduction="sum")
        return Surprise(float(nats), float(-(told.exp() * told).sum()))
