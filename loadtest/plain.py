"""The modules as they are, one piece at a time: what the torch backend is held against, and bfloat16 beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from stages.ar import ArStage
from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.block import Block


class PlainBlock(BlockRunner):
    """:param bfloat16: under torch's autocast, with caches in bfloat16: measured, not served."""

    def __init__(self, block: Block, bfloat16: bool = False) -> None:
        self.block, self.bfloat16 = block, bfloat16

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.block.read(piece.source[None], piece.caches)[0][0] for piece in pieces]

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [self._denoise(piece) for piece in pieces]

    def _denoise(self, piece: NoisyPiece) -> Denoised:
        memory = [cache.stored() for cache in piece.caches]
        if self.bfloat16:
            memory = [(keys.bfloat16(), values.bfloat16()) for keys, values in memory]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            sigma = torch.full((1, 1), piece.sigma)
            logits = self.block.denoise(piece.z[None], piece.estimate[None], sigma, memory, piece.start)
        return Denoised(logits[0], self.block.point(logits / piece.divisor)[0])


class PlainStage(StageRunner):
    def __init__(self, stage: ArStage) -> None:
        self.stage = stage

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [self.stage.read(piece.source[None], piece.caches)[0] for piece in pieces]

    @torch.inference_mode()
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return [
            torch.cat([self.stage.read(branch[None], copy.deepcopy(piece.caches)) for branch in piece.source])
            for piece in pieces
        ]

    @torch.inference_mode()
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [self.stage.next_byte(piece[None])[0] for piece in hidden]
