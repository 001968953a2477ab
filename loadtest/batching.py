"""What sharing forward passes is worth: many requests at once on loopback against a bare torch loop of that batch."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.table import aligned
from serving.client import AsyncClient, Result
from serving.deployment import temporary_deployment
from serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from serving.ports import free_port_block
from serving.topology import local_topology
from stages.ar import ArModel, new_caches
from stages.block import Block
from stages.bundle import find_bundle
from stages.checkpoint import load_ar, load_chain
from stages.errors import InputError, OnesweepError
from stages.manifest import read_manifest
from stages.noise import step_sigmas
from stages.partition import NoisePartition
from stages.parts import plan_host
from stages.randomness import sample_symbols

PROMPT = b"The old man looked at the sea and said that "
TARGET_RATIO = 0.7
HOSTS = 3
MAX_BATCH = 64
"""Requests in flight that a router takes by default."""


class TextDiffers(OnesweepError):
    """A request's text depends on its company: nothing that is measured then means anything."""


@dataclass(frozen=True)
class BatchingSettings:
    """What `onesweep bench batching` is told."""

    checkpoint: Path
    batch: int = 16
    max_bytes: int = 128
    rounds: int = 5


@dataclass(frozen=True)
class BatchingFigures:
    """Positions a second of one mode: alone, together, and in a bare loop. Medians over rounds."""

    mode: str
    batch: int
    alone: float
    """One request after the other."""
    together: float
    """`batch` requests at once."""
    bare: float
    """A torch loop over a batch in one process, all cores: no network, no sampling apart, no company to be fair to."""
    bare_one_core: float

    @property
    def ratio(self) -> float:
        return self.together / self.bare


def measure_batching(settings: BatchingSettings) -> list[BatchingFigures]:
    """Raises InputError, CheckpointError, TextDiffers."""
    bundle = find_bundle(settings.checkpoint)
    if not 1 <= settings.batch <= MAX_BATCH:
        raise InputError(f"--batch must be 1 to {MAX_BATCH}, not {settings.batch}")
    if settings.rounds < 1:
        raise InputError(f"--rounds must be at least 1, not {settings.rounds}")
    models = [path for path in (bundle.chain, bundle.ar) if path is not None]
    room = min(read_manifest(path).architecture.positions for path in models) - len(PROMPT)
    if not 1 <= settings.max_bytes <= room:
        raise InputError(
            f"--bytes must be 1 to {room}, what the context leaves after the prompt, not {settings.max_bytes}"
        )
    parts = plan_host(settings.checkpoint, (0,)).parts
    topology = local_topology(min(HOSTS, parts), parts, settings.checkpoint, free_port_block(HOSTS + 1) + 1)
    modes = (["sweep"] if bundle.chain else []) + (["ar"] if bundle.ar else [])
    with temporary_deployment(topology, settings.checkpoint):
        served = {mode: asyncio.run(_served(topology.router, mode, settings)) for mode in modes}
    figures = []
    for mode in modes:
        one_core, all_cores = (_bare(mode, settings, threads) for threads in (1, torch.get_num_threads()))
        figures.append(BatchingFigures(mode, settings.batch, *served[mode], bare=all_cores, bare_one_core=one_core))
    return figures


def batching_table(figures: list[BatchingFigures]) -> str:
    header = ("mode", "batch", "alone /s", "together /s", "bare loop /s", "bare, one core", "together / bare", "met")
    rows = [
        (
            *(f.mode, str(f.batch)),
            *(f"{value:.0f}" for value in (f.alone, f.together, f.bare, f.bare_one_core)),
            f"{f.ratio:.2f}",
            "yes" if f.ratio >= TARGET_RATIO else "no",
        )
        for f in figures
    ]
    return aligned(header, rows)


def batching_record(settings: BatchingSettings, figures: list[BatchingFigures]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    return {
        "bench": "batching",
        "max_bytes": settings.max_bytes,
        "rounds": settings.rounds,
        "target_ratio": TARGET_RATIO,
        "figures": [{**asdict(f), "ratio": f.ratio} for f in figures],
    }


async def _served(router: str, mode: str, settings: BatchingSettings) -> tuple[float, float]:
    """Positions a second alone and together; every text must be the one that the request gets alone."""
    async with AsyncClient(router) as client:

        async def ask(seed: int) -> Result:
            return await client.generate(PROMPT, mode=mode, max_bytes=settings.max_bytes, seed=seed)

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
            alone.append(settings.max_bytes / (middle - begin))
            together.append(settings.batch * settings.max_bytes / (end - middle))
    return statistics.median(alone), statistics.median(together)


@torch.inference_mode()
def _bare(mode: str, settings: BatchingSettings, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    bundle, rates = find_bundle(settings.checkpoint), []
    known = torch.tensor([list(PROMPT)] * settings.batch)
    for _ in range(settings.rounds):
        if mode == "sweep":
            assert bundle.chain is not None
            chain, partition = load_chain(bundle.chain), read_manifest(bundle.chain).partition
            assert partition is not None
            begin = time.perf_counter()
            _bare_sweep(chain, partition, known, settings.max_bytes)
        else:
            assert bundle.ar is not None
            model = load_ar(bundle.ar)
            begin = time.perf_counter()
            _bare_ar(model, known, settings.max_bytes)
        rates.append(settings.batch * settings.max_bytes / (time.perf_counter() - begin))
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
    a, source = model.architecture, known
    caches = [new_caches(a.layers, a, known.shape[1] + count, len(known)) for _ in range(a.parts)]
    for position in range(count):
        logits = model(source, caches)[:, -1]
        source = torch.tensor([list(sample_symbols(logits, 1.0, 0, position))]).T
