"""Grafted blocks in PyTorch, a piece at a time: whole-sequence work fills a processor by itself, and so what comes out
for one piece cannot depend on others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.backends.base import BlockRunner, CleanPiece, Denoised, NoisyPiece
from stages.grafting.block import Noisy
from stages.grafting.part import GraftPart


class GraftRunner(BlockRunner):
    def __init__(self, part: GraftPart) -> None:
        self.block, self.head = part.block, part.head

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.block.read(piece.source[None], piece.caches)[0][0] for piece in pieces]

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [self._denoise(piece) for piece in pieces]

    def _denoise(self, piece: NoisyPiece) -> Denoised:
        assert piece.before is not None
        # slots sit one position before what they fill: the first one where the last known symbol is, which it reads
        place, slots = piece.start - 1, len(piece.z)
        memory = [(keys[:, :, :place], values[:, :, :place]) for keys, values in (c.stored() for c in piece.caches)]
        first = torch.arange(slots) == 0
        before = piece.before[None]
        if self.block.index == 0:
            before = self.block.enter(before.expand(1, slots), first)
        noisy = Noisy(piece.z[None], piece.estimate[None], torch.tensor([[piece.sigma]]), first, start=place)
        features = self.block.denoise(before, noisy, memory)
        hidden, evidence = self.block.added.way_out(features)[0], noisy.evidence()
        logits = self.head.logits(hidden, evidence)
        point = (logits / piece.divisor).softmax(dim=1) @ self.head.codes
        return Denoised(logits, point, features[0])
