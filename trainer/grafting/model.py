"""A whole grafted model in one process: the pretrained stages, what is added to each, the frozen head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stages.checkpoint import load_stage
from stages.errors import CheckpointError, InputError
from stages.families import PipelineStage
from stages.grafting.architecture import GraftArchitecture, Shape
from stages.grafting.block import GraftBlock
from stages.grafting.head import Head
from stages.grafting.part import GraftPart
from stages.grafting.slots import Slots
from stages.manifest import Manifest, read_manifest
from stages.partition import NoisePartition
from trainer.grafting.codes import decoding


@dataclass(frozen=True)
class GraftModel:
    architecture: GraftArchitecture
    blocks: Sequence[GraftBlock]
    partition: NoisePartition
    head: Head
    """In the precision of training."""

    @property
    def device(self) -> torch.device:
        return self.head.codes.device

    @property
    def stages(self) -> list[PipelineStage]:
        """What the clean stream goes through."""
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
    shape: Shape,
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
    head = Head(weight.bfloat16() if bfloat16 else weight, codes.to(device), None if bias is None else bias.detach())
    return GraftModel(GraftArchitecture(stages[0].architecture, shape), blocks, partition, head)
