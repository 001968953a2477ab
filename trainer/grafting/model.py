"""A whole grafted model in one process: the pretrained stages, their slots, the codes, the frozen head."""

# Codes are unit vectors, near where the model's own embeddings are near. Features of a middle block reach the head by a
# tuned lens (arXiv 2303.08112), whose best linear start is computed in closed form and saves most of its training.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onesweep.stages.checkpoint.checkpoint import load_stage
from onesweep.stages.checkpoint.manifest import Manifest, read_manifest
from onesweep.stages.errors import CheckpointError, InputError
from onesweep.stages.grafting.block import GraftArchitecture, GraftBlock, GraftHead, Slots, SlotShape
from onesweep.stages.grafting.part import GraftPart
from onesweep.stages.model.families import PipelineStage
from onesweep.stages.model.partition import NoisePartition
from onesweep.trainer.blocks.optimizer import LeastSquares

# Power of the standard deviations that the principal directions are divided by: at 0 a few of them decide all, and most
# symbols share a code; at 1 near symbols are no nearer than others.
WHITENING = 0.5


@dataclass(frozen=True)
class EmbeddingCodes:
    """A table of unit-norm codes, one for each symbol."""

    rows: Tensor  # (vocabulary, dim) float32

    @classmethod
    def of_embedding(cls, embedding: Tensor, dim: int) -> EmbeddingCodes:
        """From the `dim` largest principal directions of an embedding (vocabulary, width)."""
        # Computed on the CPU: a direction's sign is a matter of the device, and codes are stored once.
        points = embedding.cpu().double()
        centred = points - points.mean(dim=0)
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
        variances, directions = variances.flip(0)[:dim], directions.flip(1)[:, :dim]
        points = centred @ directions / variances.clamp_min(1e-12) ** (WHITENING / 2)
        return cls((points / points.norm(dim=1, keepdim=True).clamp_min(1e-12)).float())

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    def table(self) -> Tensor:
        """(vocabulary, dim) float32, each row of norm 1."""
        return self.rows


def decoding(codes: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """The best linear way back from codes (vocabulary, dim) to embeddings (vocabulary, width), by least squares.

    Returns the matrix (width, dim) and the offset (width,), on the CPU: a training starts alike on every device.
    """
    known, wanted = codes.cpu().double(), embedding.cpu().double()
    centre, target = known.mean(dim=0), wanted.mean(dim=0)
    solution = torch.linalg.lstsq(known - centre, wanted - target).solution
    return solution.T.float(), (target - centre @ solution).float()


@dataclass(frozen=True)
class GraftModel:
    architecture: GraftArchitecture
    blocks: Sequence[GraftBlock]
    partition: NoisePartition
    head: GraftHead  # in the precision of training

    @property
    def device(self) -> torch.device:
        return self.head.codes.device

    @property
    def stages(self) -> list[PipelineStage]:
        """The pretrained stages, which the clean stream passes."""
        return [block.stage for block in self.blocks]

    def parts(self) -> list[GraftPart]:
        """Its blocks as hosts hold them."""
        codes, last = self.head.codes, self.stages[-1]
        return [GraftPart.of(self.architecture, block, codes, last).eval() for block in self.blocks]

    def final_norm(self, features: Tensor) -> Tensor:
        """The pretrained final norm, which the next-token head reads through."""
        norm = self.stages[-1].norm
        assert norm is not None
        normed: Tensor = norm(features)
        return normed


def pretrained(directory: Path) -> Manifest:
    """The manifest of a checkpoint that can be grafted. Raises InputError or CheckpointError."""
    manifest = read_manifest(directory)
    if manifest.kind != "ar":
        raise InputError(f"{directory} is a chain already: blocks are grafted from a model that says what comes next")
    if not manifest.complete:
        raise CheckpointError(f"{directory} is not complete")
    return manifest


def load_stages(directory: Path, device: str = "cpu") -> list[PipelineStage]:
    """All stages, checked as a host checks them."""
    return [load_stage(directory, i).to(device) for i in range(read_manifest(directory).architecture.parts)]


def new_model(
    stages: Sequence[PipelineStage],
    shape: SlotShape,
    codes: Tensor,
    partition: NoisePartition,
    lenses: Tensor,
    seed: int,
    *,
    bfloat16: bool,
) -> GraftModel:
    """A model of which nothing is trained yet: its noisy slots are the pretrained model's. It is where the stages are.

    codes: (vocabulary, code_dim); lenses: of `fit_lenses`.
    """
    last = stages[-1]
    assert last.norm is not None
    assert last.head is not None
    weight, bias = last.head.weight.detach(), last.head.bias
    device, blocks = weight.device, []
    for index, stage in enumerate(stages):
        torch.manual_seed(seed + index)
        slots = Slots(stage, shape)
        meaning = None if stage.embedding is None else decoding(codes, stage.embedding.weight)
        slots.begin(last.norm, lenses[index], meaning)
        blocks.append(GraftBlock(stage, slots.requires_grad_(False).to(device)))
    head = GraftHead(
        weight.bfloat16() if bfloat16 else weight, codes.to(device), None if bias is None else bias.detach()
    )
    return GraftModel(GraftArchitecture(stages[0].architecture, shape), blocks, partition, head)


LENS_ROWS = 4  # windows at a time


@torch.no_grad()
def fit_tuned_lenses(stages: Sequence[PipelineStage], text: Tensor) -> Tensor:
    """A lens to add to each stage's features: (stages, width, width + 1), a matrix and an offset; 0 for the last.

    Only the direction of the last features counts, for the head reads them through a norm: they are fitted at the mean
    length of the stage's own. text: (windows, length) int64, of which the first position is left out: models park
    features there that are like no others.
    """
    width, device = stages[0].architecture.width, text.device
    fits = [LeastSquares(width + 1, width, free=1, device=device) for _ in stages[:-1]]
    for part in text.split(LENS_ROWS):
        x, features = part, []
        for stage in stages:
            x = stage.read(x)
            features.append(x[:, 1:].flatten(0, 1).double())
        last = features[-1] / features[-1].norm(dim=1, keepdim=True)
        for fit, own in zip(fits, features, strict=False):
            known = torch.cat([own, own.new_ones(len(own), 1)], dim=1)
            fit.add(known, last * own.norm(dim=1, keepdim=True) - own)
    return torch.stack([*(fit.solve().T.float() for fit in fits), torch.zeros(width, width + 1, device=device)])
