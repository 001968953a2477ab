"""The yardstick of batching: the same work for a batch as bare torch loops, without hosts, links or care for company.

The nets' own code runs here, not the runners of the hosts: what torch takes at its best.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from onesweep.loadtest.host.commands import HostBenchSettings
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.client.client import AsyncClient
from onesweep.serving.drawing import DEFAULT_GUIDANCE
from onesweep.serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.checkpoint.bundle import find_bundle
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

PROMPT = b"The old man looked at the sea and said that"


@dataclass(frozen=True)
class Output:
    """A text or a picture; a text of tokens may end early."""

    output: bytes
    units: int  # tokens of a text; a picture is one


class TextRequests:
    """Requests for text, and the bare loops that write as much."""

    unit = "tokens/s"

    def __init__(self, settings: HostBenchSettings) -> None:
        """Raises InputError, CheckpointError."""
        self.settings, bundle = settings, find_bundle(settings.checkpoint)
        found = {"sweep": bundle.chain, "ar": bundle.ar}
        self.models: dict[str, Path] = {mode: path for mode, path in found.items() if path is not None}
        room = min(read_manifest(path).text_architecture.positions for path in self.models.values()) - len(PROMPT)
        if settings.max_tokens > room:
            raise InputError(
                f"--max-tokens must be 1 to {room}, what the context leaves after the prompt, not {settings.max_tokens}"
            )
        self.units = settings.max_tokens

    async def ask(self, client: AsyncClient, mode: str, seed: int) -> Output:
        result = await client.generate(PROMPT, mode=mode, max_tokens=self.units, seed=seed)
        return Output(result.output, result.output_tokens)

    def bare(self, mode: str) -> Callable[[], None]:
        """A loop over a batch of requests."""
        directory = self.models[mode]
        manifest = read_manifest(directory)
        known = torch.tensor([symbols_of(tokenizer_of(directory), PROMPT)] * self.settings.batch)
        if mode == "ar":
            stages = [load_stage(directory, i) for i in range(manifest.architecture.parts)]
            return partial(_bare_ar, stages, known, self.units)
        assert manifest.partition is not None
        return partial(_bare_sweep, load_chain(directory), manifest.partition, known, self.units)


class PictureRequests:
    """Requests for pictures, and the bare loops that draw as many."""

    unit = "pictures/s"
    units = 1

    def __init__(self, settings: HostBenchSettings) -> None:
        """Raises InputError, CheckpointError."""
        self.settings, models = settings, vars(find_bundle(settings.checkpoint))
        self.models: dict[str, Path] = {mode: models[mode] for mode in ("chain", "steps") if models[mode] is not None}
        parts = max(read_manifest(path).architecture.parts for path in self.models.values())
        if not parts <= settings.levels <= MAX_LEVELS:
            raise InputError(f"--levels must be {parts} to {MAX_LEVELS}, not {settings.levels}")

    def _class_of(self, seed: int, mode: str) -> int:
        return seed % len(read_manifest(self.models[mode]).picture_architecture.classes)

    async def ask(self, client: AsyncClient, mode: str, seed: int) -> Output:
        asked = str(self._class_of(seed, mode))
        drawn = await client.draw(asked, mode=mode, levels=self.settings.levels, seed=seed)
        return Output(drawn.pixels.tobytes(), self.units)

    def bare(self, mode: str) -> Callable[[], None]:
        """A loop over a batch of requests."""
        directory = self.models[mode]
        manifest = read_manifest(directory)
        assert manifest.partition is not None
        parts = [load_picture_part(directory, i) for i in range(manifest.architecture.parts)]
        classes = tuple(self._class_of(seed, mode) for seed in range(self.settings.batch))
        plan = DrawPlan(0, classes, self.settings.levels, guidance=DEFAULT_GUIDANCE)
        nets = [[part] for part in parts] if mode == "chain" else [parts]
        return partial(_bare_drawing, nets, manifest.partition, plan)


@torch.inference_mode()
def bare_rate(subject: TextRequests | PictureRequests, mode: str, threads: int) -> float:
    """Tokens or pictures a second of the bare loop; the median over the rounds."""
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


# E is not rounded between blocks, which changes pixels and no time.
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
