"""Chains with random weights: for measurements where only shapes matter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from stages.architecture import VOCABULARY, Architecture
from stages.block import Block
from stages.checkpoint import save_block, write_manifest
from stages.codes import Codes
from stages.manifest import Manifest, read_manifest
from stages.partition import equal_probability
from stages.probe import PROBE_TEXT

CODE_SEED = 0
SIGMA_MIN, SIGMA_MAX = 0.15, 10.0
LAYERS = 4
HEADS = 8
WIDTH_STEP = 2 * HEADS


def write_random_chain(directory: Path, architecture: Architecture, seed: int = 0) -> None:
    """A chain checkpoint of `own` blocks, made one block at a time. Raises CheckpointError."""
    codes = Codes(CODE_SEED, architecture.code_dim)
    partition = equal_probability(architecture.parts, SIGMA_MIN, SIGMA_MAX)
    nothing = (None,) * architecture.parts
    write_manifest(directory, Manifest("chain", architecture, nothing, codes, partition, probe_text=PROBE_TEXT))
    for index in range(architecture.parts):
        torch.manual_seed(seed + index)
        save_block(directory, Block(architecture, index, codes).eval())


def block_bytes(directory: Path, index: int = 0) -> int:
    """Size of a block's weights, as its file holds them."""
    part = read_manifest(directory).parts[index]
    assert part is not None
    return part.bytes


def sized_architecture(block_mb: int) -> Architecture:
    """One block of about `block_mb` million bytes."""
    one = Architecture(parts=1, layers=LAYERS, heads=HEADS)
    # numbers in a block: quadratic * width^2 + linear * width; norms and biases are left out
    quadratic = 12 * LAYERS
    linear = 6 * LAYERS * one.condition_dim + 3 * VOCABULARY + 2 * one.code_dim
    width = (math.sqrt(linear**2 + 4 * quadratic * block_mb * 1e6 / 4) - linear) / (2 * quadratic)
    return replace(one, width=max(round(width / WIDTH_STEP), 1) * WIDTH_STEP)
