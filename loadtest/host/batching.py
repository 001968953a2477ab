"""The benchmark `batching`: many requests at once on loopback against a bare torch loop over a batch of that size."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from onesweep.loadtest.host.benchmark import PROMPT, Benchmark, TextDiffers, ring_of
from onesweep.loadtest.host.settings import BatchingSettings
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.client.client import AsyncClient, Result
from onesweep.serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.checkpoint import load_ar, load_chain
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.model.block import Block
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.pipeline import ArModel, new_caches
from onesweep.stages.model.randomness import sample_symbols
from onesweep.stages.model.samplers import step_sigmas
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.signals import run_interruptible

TARGET_RATIO = 0.7


@dataclass(frozen=True)
class BatchingFigures:
    """Positions a second of one mode: alone, together, and in a bare loop. Medians over rounds."""

    mode: str
    batch: int
    alone: float  # one request after the other
    together: float  # `batch` requests at once
    # A torch loop over a batch in one process, all cores: no network, no sampling apart, no company to be fair to.
    bare: float
    bare_one_core: float

    @property
    def ratio(self) -> float:
        return self.together / self.bare


class BatchingBench(Benchmark[BatchingSettings, list[BatchingFigures]]):
    """`onesweep bench batching`: the modes that a bundle has weights for."""

    @property
    def announcement(self) -> str:
        s = self.settings
        return f"{s.batch} requests at once, {s.max_tokens} tokens each, {s.rounds} times ..."

    def check(self) -> None:
        bundle = find_bundle(self.settings.checkpoint)
        models = [path for path in (bundle.chain, bundle.ar) if path is not None]
        room = min(read_manifest(path).text_architecture.positions for path in models) - len(PROMPT)
        if not 1 <= (most := self.settings.max_tokens) <= room:
            raise InputError(f"--max-tokens must be 1 to {room}, what the context leaves after the prompt, not {most}")

    def measure(self) -> list[BatchingFigures]:
        """Raises TextDiffers."""
        s, bundle = self.settings, find_bundle(self.settings.checkpoint)
        modes = (["sweep"] if bundle.chain else []) + (["ar"] if bundle.ar else [])
        with temporary_deployment(ring := ring_of(s.checkpoint), s.checkpoint):
            served = {mode: run_interruptible(_served(ring.router, mode, s)) for mode in modes}
        figures = []
        for mode in modes:
            one_core, all_cores = (_bare(mode, s, threads) for threads in (1, torch.get_num_threads()))
            figures.append(BatchingFigures(mode, s.batch, *served[mode], bare=all_cores, bare_one_core=one_core))
        return figures

    def table(self, result: list[BatchingFigures]) -> str:
        header = ("mode", "batch", "alone /s", "together /s", "bare loop /s", "bare, one core", "together / bare")
        rows = [
            (
                *(f.mode, str(f.batch)),
                *(f"{value:.0f}" for value in (f.alone, f.together, f.bare, f.bare_one_core)),
                f"{f.ratio:.2f}",
                "yes" if f.ratio >= TARGET_RATIO else "no",
            )
            for f in result
        ]
        return aligned((*header, "met"), rows)

    def record(self, result: list[BatchingFigures]) -> dict[str, Any]:
        return {
            "bench": "batching",
            "max_tokens": self.settings.max_tokens,
            "rounds": self.settings.rounds,
            "target_ratio": TARGET_RATIO,
            "figures": [{**asdict(f), "ratio": f.ratio} for f in result],
        }


async def _served(router: str, mode: str, settings: BatchingSettings) -> tuple[float, float]:
    """Positions a second alone and together. Raises TextDiffers when a text depends on its company."""
    async with AsyncClient(router) as client:

        async def ask(seed: int) -> Result:
            return await client.generate(PROMPT, mode=mode, max_tokens=settings.max_tokens, seed=seed)

        expected = [(await ask(seed)).output for seed in range(settings.batch)]
        alone, together = [], []
        for turn in range(settings.rounds):
            begin = time.perf_counter()
            await ask(turn % settings.batch)
            middle = time.perf_counter()
            results = await asyncio.gather(*(ask(seed) for seed in range(settings.batch)))
            end = time.perf_counter()
            if [result.output for result in results] != expected:
                raise TextDiffers(f"mode {mode}: a text depends on what is generated beside it")
            alone.append(settings.max_tokens / (middle - begin))
            together.append(settings.batch * settings.max_tokens / (end - middle))
    return statistics.median(alone), statistics.median(together)


@torch.inference_mode()
def _bare(mode: str, settings: BatchingSettings, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    bundle, rates = find_bundle(settings.checkpoint), []
    directory = bundle.chain if mode == "sweep" else bundle.ar
    assert directory is not None
    known = torch.tensor([symbols_of(tokenizer_of(directory), PROMPT)] * settings.batch)
    if mode == "sweep":
        chain, partition = load_chain(directory), read_manifest(directory).partition
        assert partition is not None
        loop = partial(_bare_sweep, chain, partition)
    else:
        loop = partial(_bare_ar, load_ar(directory))
    for _ in range(settings.rounds):
        begin = time.perf_counter()
        loop(known, settings.max_tokens)
        rates.append(settings.batch * settings.max_tokens / (time.perf_counter() - begin))
    torch.set_num_threads(before)
    return statistics.median(rates)


def _bare_sweep(chain: list[Block], partition: NoisePartition, known: torch.Tensor, slots: int) -> None:
    """The evaluations of a sweep, batched, and the draw at its end."""
    start = known.shape[1]
    estimate = torch.zeros(len(known), slots, chain[0].architecture.code_dim)
    for block in chain:
        _, memory = block.read(known)
        sigmas = step_sigmas(*partition.range(block.index), DEFAULT_STEPS)
        for sigma in sigmas[:-1]:
            z = estimate + sigma * torch.randn_like(estimate)
            logits = block.denoise(z, estimate, torch.full((1, 1), sigma), memory, start)
            estimate = block.point(logits / DEFAULT_TEMPERATURE)
    z = estimate + sigmas[-1] * torch.randn_like(estimate)
    logits = block.denoise(z, estimate, torch.full((1, 1), sigmas[-1]), memory, start)
    for seed, rows in enumerate(logits):
        sample_symbols(rows, 1.0, seed, start)


def _bare_ar(model: ArModel, known: torch.Tensor, count: int) -> None:
    a, source, alphabet = model.architecture, known, Alphabet(model.architecture.vocabulary)
    caches = [new_caches(a.layers, a, known.shape[1] + count, len(known)) for _ in range(a.parts)]
    for position in range(count):
        logits = model(source, caches)[:, -1]
        source = alphabet.decode(sample_symbols(logits, 1.0, 0, position))[:, None]
