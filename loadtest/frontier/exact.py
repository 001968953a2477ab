"""Exact bits a byte of human text under the models whose distribution a mode has: no judge, no sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from loadtest.quality.arm import QualityArm
from loadtest.quality.prompts import Passage
from serving.modes.scored import SCORERS
from stages.ar import ArModel
from stages.bundle import find_bundle
from stages.checkpoint import load_ar

MODELS = ("ar", "scorer", "local")
BATCH = 16


@torch.inference_mode()
def exact_bits(checkpoint: Path, passages: Sequence[Passage]) -> dict[str, float]:
    """Bits for a byte of the true continuations after their prompts, by the name of a bundle's folder.

    At temperature 1. A model whose context is too short for a passage is left out. Raises CheckpointError.
    """
    folders = {name: path for name, path in vars(find_bundle(checkpoint)).items() if path and name in MODELS}
    found = {}
    for name, path in folders.items():
        model = load_ar(path)
        longest = max(len(p.prompt) + len(p.continuation) for p in passages)
        if longest <= model.architecture.context_bytes:
            nats = sum(_nats(model, passages[i : i + BATCH]) for i in range(0, len(passages), BATCH))
            found[name] = nats / math.log(2) / sum(len(passage.continuation) for passage in passages)
    return found


def model_of(arm: QualityArm) -> str | None:
    """The folder of the model whose distribution the arm's text has; None where none is defined."""
    if arm.mode == "verified":
        return SCORERS.get(arm.scorer or "")
    return {"local": "local", "ar": "ar", "ar-speculative": "ar"}.get(arm.mode)


def _nats(model: ArModel, passages: Sequence[Passage]) -> float:
    """Of all true continuations together. What is filled up on the right, no byte before it sees."""
    texts = [torch.frombuffer(bytearray(p.prompt + p.continuation), dtype=torch.uint8).long() for p in passages]
    logits = model(pad_sequence(texts, batch_first=True)[:, :-1])
    total = 0.0
    for row, text, passage in zip(logits, texts, passages, strict=True):
        begin = len(passage.prompt)
        total += float(F.cross_entropy(row[begin - 1 : len(text) - 1].double(), text[begin:], reduction="sum"))
    return total
