"""Checkpoints with random weights: for capacity tests, where only shapes matter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stages.ar import ArStage
from stages.architecture import Architecture
from stages.block import Block
from stages.checkpoint import save_block, save_stage, write_manifest
from stages.codes import Codes
from stages.errors import CheckpointError, ConfigError
from stages.manifest import MANIFEST_NAME, Kind, Manifest, read_manifest
from stages.probe import PROBE_TEXT
from trainer.config import NoiseConfig
from trainer.data import load_corpus
from trainer.entropy import make_partition


def create_untrained(directory: Path, kind: Kind, architecture: Architecture, seed: int = 0) -> Manifest:
    """Write a checkpoint with random weights, one part in memory at a time.

    Its gate records what these weights give, so it is loaded and checked like any other.
    Raises CheckpointError when `directory` holds a checkpoint, ConfigError when it cannot be made.
    """
    if (directory / MANIFEST_NAME).exists():
        raise CheckpointError(f"{directory} holds a checkpoint already; give another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write into {directory}: {error.strerror}; give another directory") from None
    write_manifest(directory, _manifest(kind, architecture, seed))
    out: Tensor | None = None
    for index in range(architecture.parts):
        torch.manual_seed(seed + index)
        if kind == "chain":
            block = Block(architecture, index, Codes(NoiseConfig().code_seed, architecture.code_dim)).eval()
            out = save_block(directory, block, out if architecture.context == "chained" else None)
            del block
        else:
            stage = ArStage(architecture, index).eval()
            out = save_stage(directory, stage, out)
            del stage
    return read_manifest(directory)


def _manifest(kind: Kind, architecture: Architecture, seed: int) -> Manifest:
    training = {"steps": 0, "seed": seed}
    parts = (None,) * architecture.parts
    if kind == "ar":
        return Manifest(kind, architecture, parts, probe_text=PROBE_TEXT, training=training)
    noise = NoiseConfig()
    codes = Codes(noise.code_seed, architecture.code_dim)
    partition = make_partition(noise, architecture.parts, codes, load_corpus(None).train)
    return Manifest(kind, architecture, parts, codes, partition, probe_text=PROBE_TEXT, training=training)
