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
    """Pieces and results are of the CPU, where samplers and codecs are; caches are where the part is."""

    def __init__(self, part: GraftPart) -> None:
        self.block, self.head = part.block, part.head

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        device = self.head.codes.device
        return [self.block.read(piece.source[None].to(device), piece.caches)[0][0].cpu() for piece in pieces]

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [self._denoise(piece) for piece in pieces]

    def _denoise(self, piece: NoisyPiece) -> Denoised:
        assert piece.before is not None
        # slots sit one position before what they fill: the first one where the last known symbol is, which it reads
        place, slots, device = piece.start - 1, len(piece.z), self.head.codes.device
        memory = [(keys[:, :, :place], values[:, :, :place]) for keys, values in (c.stored() for c in piece.caches)]
        first = torch.arange(slots, device=device) == 0
        before = piece.before[None].to(device)
        if self.block.index == 0:
            before = self.block.enter(before.expand(1, slots), first)
        z, estimate = piece.z[None].to(device), piece.estimate[None].to(device)
        noisy = Noisy(z, estimate, torch.tensor([[piece.sigma]], device=device), first, start=place)
        features = self.block.denoise(before, noisy, memory)
        hidden, evidence = self.block.added.way_out(features)[0], noisy.evidence()
        logits = self.head.logits(hidden, evidence)
        point = (logits / piece.divisor).softmax(dim=1) @ self.head.codes
        return Denoised(logits.cpu(), point.cpu(), features[0].cpu())
