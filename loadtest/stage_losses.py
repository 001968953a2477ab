"""What a backend's arithmetic costs in quality: cross-entropies of a text under each block that reads bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.ar import new_caches
from stages.backends import backend_named
from stages.backends.base import BlockRunner, CleanPiece, NoisyPiece
from stages.block import Block
from stages.bundle import find_bundle
from stages.checkpoint import load_block
from stages.errors import InputError
from stages.manifest import read_manifest
from stages.randomness import Purpose, normals

WINDOWS = 32
WINDOW_BYTES = 256


@dataclass(frozen=True)
class Losses:
    """Means over the text, nats a byte."""

    backend: str
    part: str
    next_byte_nats: float
    denoise_nats: float
    """At the geometric mean of the block's noise range, of the second half of each window given the first."""


def chain_losses(checkpoint: Path, backend: str, text: Path | None) -> list[Losses]:
    """:param text: windows spread over this file; the manifest's probe text if None."""
    directory = find_bundle(checkpoint).chain
    assert directory is not None
    manifest = read_manifest(directory)
    assert manifest.partition is not None
    windows = _windows(manifest.probe_text.encode() if text is None else text.read_bytes())
    losses = []
    for index in range(manifest.architecture.parts):
        block = load_block(directory, index)
        if not block.reads_bytes:
            continue
        high, low = manifest.partition.range(index)
        runner = backend_named(backend).block(block)
        sums = torch.tensor([_losses(runner, block, window, (high * low) ** 0.5) for window in windows])
        losses.append(Losses(backend, f"block {index}", *sums.mean(dim=0).tolist()))
    return losses


def _windows(text: bytes) -> list[Tensor]:
    """Up to WINDOWS windows, spread evenly."""
    size = min(WINDOW_BYTES, len(text))
    if size < 2:
        raise InputError("the text for losses is shorter than two bytes; choose another --text FILE")
    count = min(WINDOWS, len(text) // size)
    starts = [i * (len(text) - size) // max(count - 1, 1) for i in range(count)]
    return [torch.frombuffer(bytearray(text[at : at + size]), dtype=torch.uint8).long() for at in starts]


@torch.inference_mode()
def _losses(runner: BlockRunner, block: Block, window: Tensor, sigma: float) -> tuple[float, float]:
    a = block.architecture
    window = window[: a.context_bytes]
    half = len(window) // 2
    caches = new_caches(a.layers, a, len(window))
    (first,) = runner.read([CleanPiece(window[:half], caches)])
    target = window[half:]
    noise = normals(0, Purpose.INITIAL_NOISE, half, len(target), a.code_dim)
    z = block.codes[target] + sigma * noise
    (denoised,) = runner.denoise([NoisyPiece(z, torch.zeros_like(z), sigma, half, caches)])
    (second,) = runner.read([CleanPiece(target, caches)])
    logits = block.next_byte(torch.cat([first, second])[None])[0, :-1]
    return float(F.cross_entropy(logits, window[1:])), float(F.cross_entropy(denoised.logits, target))
