"""A bundle that draws, so small that a test reads it in milliseconds. Its weights are random and none of them is 0."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stages.checkpoint.checkpoint import save_parts, write_manifest
from stages.checkpoint.manifest import Manifest
from stages.model.architecture import PictureArchitecture
from stages.model.partition import NoisePartition, equal_probability
from stages.pictures.part import PictureKind, PicturePart

SIGMA_MIN, SIGMA_MAX = 0.002, 80.0
TINY = PictureArchitecture(
    height=8,
    width=8,
    channels=1,
    classes=("zero", "one", "two"),
    patch=2,
    parts=3,
    layers=1,
    features=32,
    heads=2,
    condition_dim=32,
    mean=0.3,
    deviation=0.35,
)
FOLDERS = ("chain", "steps", "local")


def tiny_partition(kind: PictureKind = "chain", architecture: PictureArchitecture = TINY) -> NoisePartition:
    """Noise ranges of a chain's blocks, or the one range of an undivided net."""
    return equal_probability(architecture.parts if kind == "chain" else 1, SIGMA_MIN, SIGMA_MAX)


def tiny_part(
    index: int = 0, kind: PictureKind = "chain", architecture: PictureArchitecture = TINY, seed: int = 0
) -> PicturePart:
    """A part with random weights: heads and modulations would begin at 0, and hide all that a test looks for."""
    torch.manual_seed(seed + 100 * index)
    part = PicturePart(architecture, index, kind).eval().requires_grad_(False)
    for parameter in part.parameters():
        parameter.add_(0.15 * torch.randn(parameter.shape))
    return part


def tiny_parts(
    kind: PictureKind = "chain", architecture: PictureArchitecture = TINY, seed: int = 0
) -> list[PicturePart]:
    """All parts of a model."""
    return [tiny_part(index, kind, architecture, seed) for index in range(architecture.parts)]


def save_pictures(directory: Path, parts: Sequence[PicturePart]) -> None:
    """Write a checkpoint of these parts, gated and whole."""
    a, kind = parts[0].architecture, parts[0].kind
    write_manifest(directory, Manifest(kind, a, (None,) * a.parts, partition=tiny_partition(kind, a)))
    save_parts(directory, parts)


def tiny_picture_bundle(
    directory: Path, kinds: Sequence[str] = FOLDERS, architecture: PictureArchitecture = TINY, seed: int = 0
) -> Path:
    """Write chain/, steps/ and local/, or those of them in `kinds`. Returns `directory`."""
    local = replace(architecture, parts=1, layers=2)
    for folder in kinds:
        kind: PictureKind = "chain" if folder == "chain" else "steps"
        save_pictures(directory / folder, tiny_parts(kind, local if folder == "local" else architecture, seed))
    return directory
