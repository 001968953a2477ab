"""The floor that serving is held against: the same work, block by block, in this process and without gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from serving.modes.base import DEFAULT_CHUNK, DEFAULT_STEPS, DEFAULT_TEMPERATURE
from serving.modes.chunked import ChunkedMode
from stages.ar import new_caches
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece
from stages.bundle import find_bundle
from stages.checkpoint import load_ar, load_chain
from stages.codec import codec_named
from stages.layers import LayerCache
from stages.manifest import read_manifest
from stages.randomness import sample_symbols
from stages.samplers import DEFAULT_SAMPLER
from stages.sweep import BlockWork, SweepPlan, clean_pieces, run_alone


@dataclass(frozen=True)
class Work:
    """One request with the router's default settings."""

    mode: str
    prompt: bytes
    max_bytes: int
    seed: int


class InProcess:
    """The models of a bundle on one thread. Its texts must be those of any deployment of the bundle."""

    def __init__(self, checkpoint: Path, backend: str = DEFAULT_BACKEND) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        bundle, maker = find_bundle(checkpoint), backend_named(backend)
        chain, ar = (read_manifest(path) if path else None for path in (bundle.chain, bundle.ar))
        self.chain, self.ar = chain, ar
        self.blocks = [maker.block(block) for block in load_chain(bundle.chain)] if bundle.chain else []
        self.stages = [maker.stage(stage) for stage in load_ar(bundle.ar).stages] if bundle.ar else []

    def generate(self, work: Work) -> bytes:
        """The text of one request."""
        if work.mode == "ar":
            return self._pipeline(work)
        return self._chunks(work, work.max_bytes if work.mode == "sweep" else min(DEFAULT_CHUNK, work.max_bytes))

    def _chunks(self, work: Work, chunk: int) -> bytes:
        assert self.chain is not None
        a, capacity = self.chain.byte_architecture, len(work.prompt) + (work.max_bytes - 1) // chunk * chunk
        caches = [new_caches(a.layers, a, capacity) for _ in self.blocks]
        clean, start, text = work.prompt, len(work.prompt), b""
        while len(text) < work.max_bytes:
            slots = min(chunk, work.max_bytes - len(text))
            plan = SweepPlan(work.seed, start, slots, DEFAULT_STEPS, DEFAULT_TEMPERATURE, DEFAULT_SAMPLER)
            clean = self._sweep(caches, plan, clean)
            start, text = start + len(clean), text + clean
        return text

    def _sweep(self, caches: list[list[LayerCache]], plan: SweepPlan, clean: bytes) -> bytes:
        assert self.chain is not None
        assert self.chain.partition is not None
        codec, before = codec_named(ChunkedMode.default_codec), None
        for index, (runner, held) in enumerate(zip(self.blocks, caches, strict=True)):
            work = BlockWork(
                self.chain.byte_architecture, index, self.chain.partition, held, plan, codec, clean, before
            )
            outcome = run_alone(work, runner)
            if isinstance(outcome, bytes):
                return outcome
            before = outcome
        raise AssertionError("the last block of a chain returns text")

    def _pipeline(self, work: Work) -> bytes:
        assert self.ar is not None
        a, capacity = self.ar.byte_architecture, len(work.prompt) + work.max_bytes - 1
        caches = [new_caches(a.layers, a, capacity) for _ in self.stages]
        clean, position, text = work.prompt, 0, b""
        while len(text) < work.max_bytes:
            for piece in clean_pieces(torch.frombuffer(bytearray(clean), dtype=torch.uint8).long()):
                x = piece
                for stage, held in zip(self.stages, caches, strict=True):
                    x = stage.read([CleanPiece(x, held)])[0]
            position += len(clean)
            (logits,) = self.stages[-1].next_byte([x[-1:]])  # of the last position only, as the last host does
            clean = sample_symbols(logits, DEFAULT_TEMPERATURE, work.seed, position)
            text += clean
        return text
