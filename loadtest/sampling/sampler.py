"""Many texts denoised together by any variant of the sampler. The unchanged one does what hosts do.

The state is z = n + w E with n the noise part, which every host can make from the seed, and E the estimate, which
travels. A step of noise level v (0 for the ODE) goes, with s = sqrt(sigma'^2 - v^2) / sigma, to
z' = s z + (1 - s) D + v eps (DDIM, arXiv 2010.02502, eq. 12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loadtest.sampling.variant import Variant
from stages.ar import ArModel, new_caches
from stages.block import Block
from stages.codec import ESTIMATE_LIMIT, FEATURE_LIMIT, StateCodec, codec_named
from stages.layers import LayerCache
from stages.partition import NoisePartition
from stages.randomness import Purpose, normals, uniforms
from stages.sweep import FEATURES

Memory = list[tuple[Tensor, Tensor]]
EVALUATIONS = 1 << 20
"""Streams of one branch: that many evaluations may draw."""
DRAFT = EVALUATIONS - 1
"""The stream of drafts."""


@dataclass(frozen=True)
class Streams:
    """The random numbers of a batch of texts: row i draws from `seeds[i]`, candidate `branches[i]`."""

    seeds: tuple[int, ...]
    branches: tuple[int, ...]

    def branched(self, count: int) -> Streams:
        """`count` rows for each."""
        seeds = tuple(seed for seed in self.seeds for _ in range(count))
        return Streams(seeds, tuple(range(count)) * len(self.seeds))

    def noise(self, start: int, slots: int, dim: int, evaluation: int = 0) -> Tensor:
        """Standard normal numbers: (rows, slots, dim)."""
        rows = [
            normals(seed, Purpose.INITIAL_NOISE, start, slots, dim, branch * EVALUATIONS + evaluation)
            for seed, branch in zip(self.seeds, self.branches, strict=True)
        ]
        return torch.stack(rows)

    def draw(self, logits: Tensor, temperature: float, start: int, evaluation: int = 0) -> Tensor:
        """Bytes (rows, slots) int64 by their odds at a temperature. logits: (rows, slots, 256)."""
        if temperature == 0:
            return logits.argmax(-1)
        _, slots, vocabulary = logits.shape
        scores = logits.double().numpy()
        with np.errstate(over="ignore"):
            scores = (scores - scores.max(axis=-1, keepdims=True)) / temperature
        for row, (seed, branch) in enumerate(zip(self.seeds, self.branches, strict=True)):
            u = uniforms(seed, Purpose.SAMPLE, start, slots, vocabulary, branch * EVALUATIONS + evaluation)
            scores[row] += -np.log(-np.log(u * (1 - 2.0**-53)))
        return torch.from_numpy(scores.argmax(axis=-1))


@dataclass(frozen=True)
class Written:
    """Texts and their price."""

    texts: list[bytes]
    sweeps: int
    """Of each text."""
    evaluated: int
    """Slots that a block evaluated, for each text: the hosts' work."""


class Sampler:
    """A chain in this process, and a local model for variants that ask for one."""

    def __init__(self, blocks: Sequence[Block], partition: NoisePartition, local: ArModel | None = None) -> None:
        self.blocks, self.partition, self.local = blocks, partition, local
        self.architecture = blocks[0].architecture

    @torch.inference_mode()
    def write(self, prompts: Tensor, max_bytes: int, variant: Variant, seeds: Sequence[int]) -> Written:
        """One text of `max_bytes` after each prompt. prompts: (rows, bytes) int64; seeds: one a row."""
        a, chunk = self.architecture, variant.chunk or max_bytes
        caches = [new_caches(a.layers, a, prompts.shape[1] + max_bytes, len(prompts)) for _ in self.blocks]
        streams = Streams(tuple(seeds), (0,) * len(prompts))
        text, clean, sweeps, evaluated = prompts, prompts, 0, 0
        end = prompts.shape[1] + max_bytes
        while text.shape[1] < end:
            self._read(caches, clean)
            slots = min(chunk, end - text.shape[1])
            sweep = Sweep(self, variant, streams.branched(variant.candidates), caches, text, slots)
            written = self._favourite(text, sweep.run().reshape(len(text), variant.candidates, slots))
            # the last chunk is kept whole: nothing comes after it
            clean = written[:, : variant.keep or slots] if text.shape[1] + slots < end else written
            text, sweeps, evaluated = torch.cat([text, clean], 1), sweeps + 1, evaluated + sweep.evaluated
        texts = [bytes(row) for row in text[:, prompts.shape[1] :].to(torch.uint8).tolist()]
        return Written(texts, sweeps, evaluated)

    def _read(self, caches: list[list[LayerCache]], clean: Tensor) -> None:
        source = clean
        for block, held in zip(self.blocks, caches, strict=True):
            features, _ = block.read(clean if block.reads_bytes else source, held)
            source = through(FEATURES, features, FEATURE_LIMIT)

    def _favourite(self, text: Tensor, written: Tensor) -> Tensor:
        """Of candidates (rows, candidates, slots) the one that the local model finds likeliest: (rows, slots)."""
        rows, candidates, slots = written.shape
        if candidates == 1:
            return written[:, 0]
        assert self.local is not None, "candidates are chosen by a local model"
        whole = torch.cat([text.repeat_interleave(candidates, 0), written.reshape(-1, slots)], 1)
        best = byte_nats(self.local, whole, slots).sum(1).reshape(rows, candidates).argmin(1)
        return written[torch.arange(rows), best]


class Sweep:
    """One chunk of every text, from noise to bytes."""

    def __init__(
        self,
        sampler: Sampler,
        variant: Variant,
        streams: Streams,
        caches: list[list[LayerCache]],
        text: Tensor,
        slots: int,
    ) -> None:
        self.variant, self.streams, self.blocks = variant, streams, sampler.blocks
        self._local, self._text = sampler.local, text
        self.start, self.slots, self.codec = text.shape[1], slots, codec_named(variant.codec)
        self.codes = sampler.blocks[0].codes
        self._levels = variant.levels(sampler.partition)
        self._memories = [[tuple_of(cache.stored(), variant.candidates) for cache in held] for held in caches]
        rows, dim = len(streams.seeds), self.codes.shape[1]
        noise = streams.noise(self.start, slots, dim)
        self.estimate = self._point = torch.zeros(rows, slots, dim)
        self.noise, self.weight = noise * (variant.start or sampler.partition.sigma_max), 0.0
        if variant.draft:
            assert sampler.local is not None, "drafts are written by a local model"
            draft = continue_text(sampler.local, text, slots, variant.temperature, streams, DRAFT)
            self.estimate, self.weight = self.codes[draft], 1.0
        self.evaluated, self._evaluations = 0, 0

    def run(self) -> Tensor:
        """Bytes (rows, slots) int64."""
        logits = torch.empty(0)
        for block, memory, levels in zip(self.blocks, self._memories, self._levels, strict=True):
            if not levels:
                continue
            if self._evaluations:
                self._cross()
            for sigma, sigma_next in levels:
                if sigma_next is None and self.variant.reader == "local":
                    return self._read_by_local(sigma)
                logits = self._evaluate(block, memory, sigma)
                if sigma_next is not None:
                    self._step(logits, sigma, sigma_next)
        return self.streams.draw(logits, self.variant.read_temperature, self.start)

    def _read_by_local(self, sigma: float) -> Tensor:
        assert self._local is not None, "a local model reads the text"
        evidence = (self.noise + self.weight * self.estimate) @ self.codes.T / sigma**2
        return continue_text(
            self._local, self._text, self.slots, self.variant.read_temperature, self.streams, evidence=evidence
        )

    def _cross(self) -> None:
        """A block's boundary."""
        if self.variant.rounded:
            self.estimate = self.codes[(self.estimate @ self.codes.T).argmax(-1)]
        self.estimate = through(self.codec, self.estimate, ESTIMATE_LIMIT)

    def _evaluate(self, block: Block, memory: Memory, sigma: float) -> Tensor:
        z, level = self.noise + self.weight * self.estimate, torch.full((len(self.noise), 1), sigma)
        condition = {"estimate": self.estimate, "point": self._point}.get(self.variant.condition, torch.zeros_like(z))
        for _ in range(self.variant.evaluations_a_step):
            logits = block.denoise(z, condition, level, memory, self.start)
            condition = block.point(logits)
            self.evaluated += self.slots * self.variant.candidates
        self._evaluations += 1
        return logits

    def _step(self, logits: Tensor, sigma: float, sigma_next: float) -> None:
        point = self._denoised(logits / self.variant.temperature, sigma)
        new = self._new_noise(sigma, sigma_next)
        kept = math.sqrt(max(sigma_next**2 - new**2, 0.0)) / sigma
        weight = kept * self.weight + 1 - kept
        self.noise = kept * self.noise
        if new:
            self.noise = self.noise + new * self.streams.noise(
                self.start, self.slots, point.shape[-1], self._evaluations
            )
        self.estimate = (kept * self.weight * self.estimate + (1 - kept) * point) / weight
        self.weight, self._point = weight, point

    def _new_noise(self, sigma: float, sigma_next: float) -> float:
        ancestral = sigma_next * math.sqrt(1 - (sigma_next / sigma) ** 2)
        return self.variant.eta * {"kept": 0.0, "ancestral": ancestral, "fresh": sigma_next}[self.variant.noise]

    def _denoised(self, logits: Tensor, sigma: float) -> Tensor:
        """Where the step goes: (rows, slots, code_dim)."""
        v, odds = self.variant, logits.softmax(-1)
        mean = odds @ self.codes
        if v.point == "mean" or sigma >= v.below:
            return mean
        best, chosen = odds.max(-1)
        if v.point == "byte":
            chosen = self.streams.draw(logits, 1.0, self.start, self._evaluations)
        return torch.where((best >= v.sure)[..., None], self.codes[chosen], mean)


def tuple_of(stored: tuple[Tensor, Tensor], candidates: int) -> tuple[Tensor, Tensor]:
    """Keys and values, one copy for each candidate."""
    keys, values = (kept if candidates == 1 else kept.repeat_interleave(candidates, 0) for kept in stored)
    return keys, values


def through(codec: StateCodec, rows: Tensor, limit: float) -> Tensor:
    """What the other side of a boundary sees. rows: (rows, positions, dim)."""
    return codec.round_trip(rows.reshape(-1, rows.shape[-1]), limit).reshape(rows.shape)


@torch.inference_mode()
def continue_text(
    model: ArModel,
    text: Tensor,
    count: int,
    temperature: float,
    streams: Streams,
    evaluation: int = 0,
    evidence: Tensor | None = None,
) -> Tensor:
    """`count` bytes of an AR model after each text: (rows, count) int64.

    text: (texts, bytes) int64, each continued in as many rows as `streams` has for it; evidence: what else is known of
    each byte, as log-odds (rows, count, 256).
    """
    text = text.repeat_interleave(len(streams.seeds) // len(text), 0)
    a, length = model.architecture, text.shape[1]
    caches = [new_caches(a.layers, a, length + count, len(text)) for _ in model.stages]
    source, written = text, []
    for position in range(length, length + count):
        logits = model(source, caches)[:, -1:]
        if evidence is not None:
            logits = logits + evidence[:, position - length : position - length + 1]
        source = streams.draw(logits, temperature, position, evaluation)
        written.append(source)
    return torch.cat(written, 1)


@torch.inference_mode()
def byte_nats(model: ArModel, text: Tensor, last: int) -> Tensor:
    """Nats of each of the `last` bytes of every text, given all before it: (rows, last). text: (rows, bytes) int64."""
    odds = model(text[:, :-1]).float().log_softmax(-1)[:, -last:]
    return -odds.gather(-1, text[:, -last:, None])[..., 0]
