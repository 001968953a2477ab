"""The benchmark `batching`: many requests at once on loopback against a bare torch loop over a batch of that size."""

import asyncio
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onesweep.loadtest.host.benchmark import PROMPT, Benchmark, TextDiffers, ring_of
from onesweep.loadtest.host.settings import BatchingSettings
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.client.client import AsyncClient
from onesweep.serving.drawing import DEFAULT_GUIDANCE
from onesweep.serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.checkpoint.bundle import bundle_draws, find_bundle
from onesweep.stages.checkpoint.checkpoint import load_chain, load_picture_part, load_stage
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.model.block import Block
from onesweep.stages.model.families import PipelineStage
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.pipeline import new_caches
from onesweep.stages.model.randomness import sample_symbols
from onesweep.stages.model.samplers import step_sigmas
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.pictures.part import PicturePart
from onesweep.stages.pictures.trajectory import MAX_LEVELS, DrawPlan, Trajectory, block_sigmas
from onesweep.stages.signals import run_interruptible

TARGET_RATIO = 0.7


@dataclass(frozen=True)
class BatchingFigures:
    """Positions, or pictures, a second of one mode: alone, together, and in a bare loop. Medians over rounds."""

    mode: str
    batch: int
    alone: float  # one request after the other
    together: float  # `batch` requests at once
    # A torch loop over a batch in one process, all cores: no network, no sampling apart, no company to be fair to.
    bare: float
    bare_one_core: float

    @property
    def ratio(self) -> float:
        # On a busy machine two threads of one loop wait for each other, and it is slower than one alone.
        return self.together / max(self.bare, self.bare_one_core)


@dataclass(frozen=True)
class _Output:
    """A text or a picture; a text of tokens may end early."""

    output: bytes
    units: int


class _Subject(ABC):
    """Requests of one kind: texts or pictures."""

    def __init__(self, settings: BatchingSettings) -> None:
        self.settings, bundle = settings, find_bundle(settings.checkpoint)
        self.models: dict[str, Path] = {mode: path for mode, path in self._modes(vars(bundle)) if path is not None}

    @abstractmethod
    def _modes(self, models: dict[str, Path | None]) -> list[tuple[str, Path | None]]:
        """Modes, and what serves them."""

    @property
    @abstractmethod
    def request(self) -> str:
        """One request in words."""

    @property
    @abstractmethod
    def units(self) -> int:
        """Positions or pictures that a request brings at most, and one of the bare loop."""

    @abstractmethod
    def check(self) -> None:
        """Raises InputError."""

    @abstractmethod
    async def ask(self, client: AsyncClient, mode: str, seed: int) -> _Output:
        """One request."""

    @abstractmethod
    def bare(self, mode: str) -> Callable[[], None]:
        """A loop over a batch of requests."""


class _Texts(_Subject):
    def _modes(self, models: dict[str, Path | None]) -> list[tuple[str, Path | None]]:
        return [("sweep", models["chain"]), ("ar", models["ar"])]

    @property
    def request(self) -> str:
        return f"{self.settings.max_tokens} tokens"

    @property
    def units(self) -> int:
        return self.settings.max_tokens

    def check(self) -> None:
        room = min(read_manifest(path).text_architecture.positions for path in self.models.values()) - len(PROMPT)
        if not 1 <= (most := self.settings.max_tokens) <= room:
            raise InputError(f"--max-tokens must be 1 to {room}, what the context leaves after the prompt, not {most}")

    async def ask(self, client: AsyncClient, mode: str, seed: int) -> _Output:
        result = await client.generate(PROMPT, mode=mode, max_tokens=self.settings.max_tokens, seed=seed)
        return _Output(result.output, result.output_tokens)

    def bare(self, mode: str) -> Callable[[], None]:
        s, directory = self.settings, self.models[mode]
        known = torch.tensor([symbols_of(tokenizer_of(directory), PROMPT)] * s.batch)
        if mode == "ar":
            parts = read_manifest(directory).architecture.parts
            return partial(_bare_ar, [load_stage(directory, i) for i in range(parts)], known, s.max_tokens)
        partition = read_manifest(directory).partition
        assert partition is not None
        return partial(_bare_sweep, load_chain(directory), partition, known, s.max_tokens)


class _Pictures(_Subject):
    def _modes(self, models: dict[str, Path | None]) -> list[tuple[str, Path | None]]:
        return [(mode, models[mode]) for mode in ("chain", "steps")]

    @property
    def request(self) -> str:
        return f"a picture of {self.settings.levels} levels"

    @property
    def units(self) -> int:
        return 1

    def check(self) -> None:
        parts = max(read_manifest(path).architecture.parts for path in self.models.values())
        if not parts <= (levels := self.settings.levels) <= MAX_LEVELS:
            raise InputError(f"--levels must be {parts} to {MAX_LEVELS}, not {levels}")

    def _class_of(self, seed: int, mode: str) -> int:
        return seed % len(read_manifest(self.models[mode]).picture_architecture.classes)

    async def ask(self, client: AsyncClient, mode: str, seed: int) -> _Output:
        asked = str(self._class_of(seed, mode))
        drawn = await client.draw(asked, mode=mode, levels=self.settings.levels, seed=seed)
        return _Output(drawn.pixels.tobytes(), self.units)

    def bare(self, mode: str) -> Callable[[], None]:
        s, directory = self.settings, self.models[mode]
        manifest = read_manifest(directory)
        assert manifest.partition is not None
        parts = [load_picture_part(directory, i) for i in range(manifest.architecture.parts)]
        classes = tuple(self._class_of(seed, mode) for seed in range(s.batch))
        plan = DrawPlan(0, classes, s.levels, guidance=DEFAULT_GUIDANCE)
        nets = [[part] for part in parts] if mode == "chain" else [parts]
        return partial(_bare_drawing, nets, manifest.partition, plan)


class BatchingBench(Benchmark[BatchingSettings, list[BatchingFigures]]):
    """`onesweep bench batching`: the modes that a bundle has weights for."""

    def __init__(self, settings: BatchingSettings) -> None:
        super().__init__(settings)
        self.subject = (_Pictures if bundle_draws(settings.checkpoint) else _Texts)(settings)

    @property
    def announcement(self) -> str:
        s = self.settings
        return f"{s.batch} requests at once, {self.subject.request} each, {s.rounds} times ..."

    def check(self) -> None:
        self.subject.check()

    def measure(self) -> list[BatchingFigures]:
        """Raises TextDiffers."""
        s, modes = self.settings, list(self.subject.models)
        with temporary_deployment(ring := ring_of(s.checkpoint), s.checkpoint):
            served = {mode: run_interruptible(_served(ring.router, mode, self.subject)) for mode in modes}
        figures = []
        for mode in modes:
            one_core, all_cores = (_bare(mode, self.subject, threads) for threads in (1, torch.get_num_threads()))
            figures.append(BatchingFigures(mode, s.batch, *served[mode], bare=all_cores, bare_one_core=one_core))
        return figures

    def table(self, result: list[BatchingFigures]) -> str:
        header = ("mode", "batch", "alone /s", "together /s", "bare loop /s", "bare, one core", "together / bare")
        digits = 0 if isinstance(self.subject, _Texts) else 1
        rows = [
            (
                *(f.mode, str(f.batch)),
                *(f"{value:.{digits}f}" for value in (f.alone, f.together, f.bare, f.bare_one_core)),
                f"{f.ratio:.2f}",
                "yes" if f.ratio >= TARGET_RATIO else "no",
            )
            for f in result
        ]
        return aligned((*header, "met"), rows)

    def record(self, result: list[BatchingFigures]) -> dict[str, Any]:
        return {
            "bench": "batching",
            "request": self.subject.request,
            "rounds": self.settings.rounds,
            "target_ratio": TARGET_RATIO,
            "figures": [{**asdict(f), "ratio": f.ratio} for f in result],
        }


async def _served(router: str, mode: str, subject: _Subject) -> tuple[float, float]:
    """Units a second alone and together. Raises TextDiffers when a result depends on its company."""
    batch, alone, together = subject.settings.batch, list[float](), list[float]()
    async with AsyncClient(router) as client:
        expected = [await subject.ask(client, mode, seed) for seed in range(batch)]
        for turn in range(subject.settings.rounds):
            begin = time.perf_counter()
            one = await subject.ask(client, mode, turn % batch)
            middle = time.perf_counter()
            results = await asyncio.gather(*(subject.ask(client, mode, seed) for seed in range(batch)))
            end = time.perf_counter()
            if results != expected:
                raise TextDiffers(f"mode {mode}: a result depends on what is asked for beside it")
            alone.append(one.units / (middle - begin))
            together.append(sum(each.units for each in results) / (end - middle))
    return statistics.median(alone), statistics.median(together)


@torch.inference_mode()
def _bare(mode: str, subject: _Subject, threads: int) -> float:
    before, rates, loop = torch.get_num_threads(), list[float](), subject.bare(mode)
    torch.set_num_threads(threads)
    for _ in range(subject.settings.rounds):
        begin = time.perf_counter()
        loop()
        rates.append(subject.settings.batch * subject.units / (time.perf_counter() - begin))
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


def _bare_ar(stages: list[PipelineStage], known: torch.Tensor, count: int) -> None:
    a, last, source = stages[0].architecture, stages[-1], known
    alphabet = Alphabet(a.vocabulary)
    capacity = known.shape[1] + count
    caches = [new_caches(len(stage.layers), a, capacity, len(known)) for stage in stages]
    for position in range(count):
        x = source
        for stage, held in zip(stages, caches, strict=True):
            x = stage.read(x, held)
        logits = last.next_byte(x[:, -1:])[:, 0]
        source = alphabet.decode(sample_symbols(logits, 1.0, 0, position))[:, None]


# The nets' own code, not the runners of the hosts: what torch takes without care for company. E is not rounded between
# blocks, which changes pixels and no time.
def _bare_drawing(nets: list[list[PicturePart]], partition: NoisePartition, plan: DrawPlan) -> None:
    """The evaluations of a drawing, batched. nets: those of each range of noise."""
    estimate = None
    for block, parts in enumerate(nets):
        sigmas, is_last = block_sigmas(partition, block, plan.levels), block == len(nets) - 1
        architecture = parts[0].architecture
        trajectory = Trajectory(architecture, plan, partition.sigma_max, sigmas, is_last=is_last, estimate=estimate)
        while not trajectory.done:
            piece = trajectory.piece()
            x = piece.x
            for part in parts:
                x = part(x, torch.full((len(x),), piece.sigma), piece.classes)
            trajectory.supply(x)
        estimate = trajectory.estimate
    trajectory.pixels()
