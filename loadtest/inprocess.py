"""The floor that serving is held against: the same work, block by block, in this process and without gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from serving.modes.base import DEFAULT_CHUNK, DEFAULT_CODEC, DEFAULT_STEPS, DEFAULT_TEMPERATURE
from stages.ar import new_caches
from stages.bundle import find_bundle
from stages.checkpoint import load_ar, load_chain
from stages.codec import codec_named
from stages.manifest import read_manifest
from stages.randomness import sample_bytes
from stages.sweep import BlockSequence, SweepPlan, run_block


@dataclass(frozen=True)
class Work:
    """One request with the router's default settings."""

    mode: str
    prompt: bytes
    max_bytes: int
    seed: int


class InProcess:
    """The models of a bundle on one thread. Its texts must be those of any deployment of the bundle."""

    def __init__(self, checkpoint: Path) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        bundle = find_bundle(checkpoint)
        self.blocks = load_chain(bundle.chain) if bundle.chain else []
        self.partition = read_manifest(bundle.chain).partition if bundle.chain else None
        self.ar = load_ar(bundle.ar) if bundle.ar else None

    def generate(self, work: Work) -> bytes:
        """The text of one request."""
        if work.mode == "ar":
            return self._pipeline(work)
        return self._chunks(work, work.max_bytes if work.mode == "sweep" else min(DEFAULT_CHUNK, work.max_bytes))

    def _chunks(self, work: Work, chunk: int) -> bytes:
        assert self.partition is not None
        capacity = len(work.prompt) + (work.max_bytes - 1) // chunk * chunk
        sequences = [BlockSequence(block, self.partition, capacity) for block in self.blocks]
        clean, start, text = work.prompt, len(work.prompt), b""
        while len(text) < work.max_bytes:
            slots = min(chunk, work.max_bytes - len(text))
            clean = _sweep(sequences, SweepPlan(work.seed, start, slots, DEFAULT_STEPS, DEFAULT_TEMPERATURE), clean)
            start, text = start + len(clean), text + clean
        return text

    @torch.inference_mode()
    def _pipeline(self, work: Work) -> bytes:
        assert self.ar is not None
        a, capacity = self.ar.architecture, len(work.prompt) + work.max_bytes - 1
        caches = [new_caches(a.layers, a, capacity) for _ in range(a.parts)]
        clean, position, text = work.prompt, 0, b""
        while len(text) < work.max_bytes:
            x = torch.frombuffer(bytearray(clean), dtype=torch.uint8).long()[None]
            for stage, cache in zip(self.ar.stages, caches, strict=True):
                x = stage.read(x, cache)
            position += len(clean)
            logits = self.ar.stages[-1].next_byte(x[:, -1:])[0]  # of the last position only, as the last host does
            clean = sample_bytes(logits, DEFAULT_TEMPERATURE, work.seed, position)
            text += clean
        return text


def _sweep(sequences: list[BlockSequence], plan: SweepPlan, clean: bytes) -> bytes:
    codec, boundary = codec_named(DEFAULT_CODEC), None
    for sequence in sequences:
        outcome = run_block(sequence, plan, codec, clean, boundary)
        if isinstance(outcome, bytes):
            return outcome
        boundary = outcome
    raise AssertionError("the last block of a chain returns text")
