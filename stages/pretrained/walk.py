"""One way through a model's layers, for many readings of them at once.

A layer is read, run for every reading, and let go: memory holds one layer, however large the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.llama.architecture import LlamaArchitecture
from stages.llama.rotary import llama_rotary
from stages.pretrained.source import EMBEDDING, HEAD, NORM, Source
from stages.pretrained.variant import Tensors, Variant


@torch.inference_mode()
def losses(source: Source, tokens: Sequence[int], variants: Sequence[Variant]) -> list[float]:
    """Cross-entropy (nats a token) of the probe's tokens in each reading."""
    known = torch.tensor(tokens)
    rotary = lru_cache(None)(lambda a: llama_rotary(replace(a, positions=len(tokens))))
    hidden = [source.tensor(EMBEDDING)[known][None]] * len(variants)
    for i in range(sum(source.architecture.layers)):
        tensors = layer_tensors(source, i)
        hidden = [
            variant.layer(tensors, i)(x, rotary(variant.architecture))
            for variant, x in zip(variants, hidden, strict=True)
        ]
    return _nats(source, known, variants, hidden)


def layer_tensors(source: Source, index: int) -> Tensors:
    """The tensors of one layer, by their names within it."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): source.tensor(name) for name in source.shapes() if name.startswith(prefix)}


def _nats(source: Source, known: Tensor, variants: Sequence[Variant], hidden: Sequence[Tensor]) -> list[float]:
    weight, found = source.tensor(NORM), [0.0] * len(variants)
    for tied in {variant.architecture.tied_head for variant in variants}:
        head = source.tensor(EMBEDDING if tied else HEAD)
        for i, (variant, x) in enumerate(zip(variants, hidden, strict=True)):
            a: LlamaArchitecture = variant.architecture
            if a.tied_head == tied:
                logits = F.rms_norm(x[0, :-1], (a.width,), weight, a.norm_epsilon) @ head.t()
                found[i] = float(F.cross_entropy(logits, known[1:]))
    return found
