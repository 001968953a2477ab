"""Grafted blocks in a row: the clean features and the slots' features go from each to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stages.grafting.block import GraftBlock, Memory, Noisy
from stages.grafting.head import Head
from stages.partition import NoisePartition


def read_all(blocks: Sequence[GraftBlock], tokens: Tensor) -> tuple[Tensor, list[Memory]]:
    """The clean stream through `blocks`, the first of which is block 0: its features after the last, and memories.

    Without blocks the features are the tokens themselves.
    """
    x, memories = tokens, []
    for block in blocks:
        x, memory = block.read(x)
        memories.append(memory)
    return x, memories


def roll(
    blocks: Sequence[GraftBlock],
    memories: Sequence[Memory],
    entered: Tensor,
    noisy: Noisy,
    levels: Sequence[Tensor],
    noise: Sequence[Tensor],
    head: Head | None,
) -> tuple[Tensor, Tensor]:
    """What the blocks before hand over when their slots had more noise: features and estimate of the slots.

    The noisier states are made from `noisy.z` by adding noise, so that they say nothing about the text that it does not
    say: a chain of blocks cannot learn to combine two states into the answer.

    levels: sigma of each block, (batch, slots), falling from block to block; noise: standard normal, as `noisy.z`, that
    of the last block first. :param head: None for no estimate.
    """
    states, z, sigma = [], noisy.z, noisy.sigma
    for level, added in zip(reversed(levels), noise, strict=True):
        level = torch.maximum(level, sigma)
        more = (level**2 - sigma**2).clamp_min(0).sqrt()[..., None]
        z = z + more * added
        sigma = level
        states.append((z, sigma))
    features, estimate = entered, torch.zeros_like(noisy.z)
    for block, memory, (z, sigma) in zip(blocks, memories, reversed(states), strict=True):
        there = replace(noisy, z=z, sigma=sigma, estimate=estimate)
        features = block.denoise(features, there, memory)
        if head is not None:
            estimate = block.point(features, there, head)
    return features, estimate


def levels_before(partition: NoisePartition, index: int, shares: Tensor) -> list[Tensor]:
    """A noise level of each block before `index`, where it may have been evaluated last.

    shares: uniform numbers, (index, batch, slots); log sigma is uniform in each block's range.
    """
    found = []
    for block in range(index):
        high, low = partition.range(block)
        found.append(torch.exp(math.log(low) + shares[block] * math.log(high / low)))
    return found
