"""Rows of `bench host` on a ring over loopback: a sweep's overhead on the model, batching, idle servers."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

from loadtest.commands import Row, echo
from loadtest.workload.testbed import DEFAULT_HOSTS, block_count, default_hosts
from loadtest.workload.texts import tokens_of
from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import AsyncClient, DrawnPictures, Result
from serving.modes import DEFAULT_GUIDANCE
from serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from serving.modes.pretrained_tokenizer import tokenizer_of
from serving.router.topology import local_topology
from stages.backends.rows import torch_threads
from stages.checkpoint.bundle import bundle_draws, find_bundle
from stages.checkpoint.checkpoint import load_chain, load_picture_part, load_stage
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError
from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import PipelineStage, new_caches
from stages.model.randomness import sample_tokens
from stages.model.samplers import step_sigmas
from stages.model.vocabulary import Vocabulary
from stages.pictures.part import PicturePart
from stages.pictures.trajectory import MAX_LEVELS, DrawPlan, Trajectory, block_sigmas
from stages.signals import run_interruptible

if TYPE_CHECKING:
    from loadtest.benches import HostBenchSettings

# Most milliseconds of overhead per sweep, for a ring of three; a sweep of `ar` is a token.
TARGETS_MS = {"sweep": 8.0, "chunked": 8.0, "ar": 2.5}
BARE = ("sweep", "ar", "chain", "steps")  # modes with a bare loop
IDLE_PERCENT = 0.5  # of a core: an idle host must cost its owner nothing
SETTLE_S = 15.0  # between the last request and the idle measurement
IDLE_S = 20.0  # duration of this measurement


@dataclass(frozen=True)
class TimedAnswer:
    """A text or a picture, and its time at the client. Two are equal if their outputs are."""

    output: bytes
    units: int  # tokens of a text, which may end early; 1 for a picture
    latency_ms: float = field(compare=False)  # from the call to the end of the account
    compute_ms: float = field(compare=False)  # as the hosts report it
    sweeps: int = field(compare=False)


def measure_ring(settings: HostBenchSettings) -> list[Row]:
    """Rows of every mode that the bundle has weights for. Raises OnesweepError."""
    hosts = default_hosts(settings.checkpoint) if settings.hosts is None else settings.hosts
    blocks = block_count(settings.checkpoint)
    ring = local_topology(hosts, blocks, settings.checkpoint, free_port_block(hosts + 1) + 1)
    subject = (PictureRequests if bundle_draws(settings.checkpoint) else TextRequests)(settings)
    echo(f"{hosts} hosts on loopback; keep the machine idle ...")
    with temporary_deployment(ring, settings.checkpoint) as deployment:
        served = {mode: run_interruptible(_served(ring.router, mode, subject)) for mode in subject.models}
        idle = _idle_rows(deployment)
    rows = list[Row]()
    # after the hosts have stopped, since they would share the cores
    for mode, (alone, together) in served.items():
        rows += [
            *alone_rows(mode, hosts, subject.unit, alone),
            Row(f"{mode}: {settings.batch} requests at once", together, subject.unit),
        ]
        if mode in BARE:
            # on a busy machine, two threads of one loop wait for each other and are slower than one
            bare = max(bare_rate(subject, mode, threads) for threads in (1, torch.get_num_threads()))
            rows += [
                Row(f"{mode}: bare torch loop over {settings.batch}", bare, subject.unit),
                Row(f"{mode}: at once over the bare loop", together / bare, "x"),
            ]
    return rows + idle


def alone_rows(mode: str, hosts: int, unit: str, alone: Sequence[TimedAnswer]) -> list[Row]:
    """Medians over sequential requests of one mode."""
    median = statistics.median
    overhead = median((each.latency_ms - each.compute_ms) / each.sweeps for each in alone)
    target_ms = TARGETS_MS.get(mode) if hosts == DEFAULT_HOSTS else None
    return [
        Row(f"{mode}: latency", median(each.latency_ms for each in alone), "ms"),
        Row(f"{mode}: latency over compute", median(each.latency_ms / each.compute_ms for each in alone), "x"),
        Row(f"{mode}: a sweep on top of the model", overhead, "ms", target_ms),
        Row(f"{mode}: one request after the other", median(1000 * a.units / a.latency_ms for a in alone), unit),
    ]


async def _served(router: str, mode: str, subject: TextRequests | PictureRequests) -> tuple[list[TimedAnswer], float]:
    """Sequential requests; and tokens or pictures per second of the same requests at once.

    Raises OnesweepError if a result depends on its batch, which makes every measurement meaningless.
    """
    seeds, together = range(subject.settings.batch), list[float]()
    async with AsyncClient(router) as client:
        await _timed(client, mode, subject, 0)  # opens connections and loads kernels
        alone = [await _timed(client, mode, subject, seed) for seed in seeds]
        for _ in range(subject.settings.rounds):
            begin = time.perf_counter()
            answers: list[TimedAnswer] = await asyncio.gather(*(_timed(client, mode, subject, seed) for seed in seeds))
            end = time.perf_counter()
            if answers != alone:
                raise OnesweepError(f"mode {mode}: a result depends on the other requests in its batch")
            together.append(sum(each.units for each in answers) / (end - begin))
    return alone, statistics.median(together)


async def _timed(client: AsyncClient, mode: str, subject: TextRequests | PictureRequests, seed: int) -> TimedAnswer:
    begin = time.perf_counter()
    result = await subject.ask(client, mode, seed)
    latency_ms = 1000 * (time.perf_counter() - begin)
    if isinstance(result, Result):
        output, units = result.output, result.output_tokens
    else:
        output, units = result.pixels.tobytes(), 1
    return TimedAnswer(output, units, latency_ms, result.compute_ms, result.sweeps)


def _idle_rows(deployment: Deployment) -> list[Row]:
    """Processor time of an idle ring's servers after work."""
    time.sleep(SETTLE_S)
    processes = {name: psutil.Process(pid) for name, pid in deployment.processes.items()}
    before_s = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}  # user and system
    time.sleep(IDLE_S)
    worked_s = {name: sum(process.cpu_times()[:2]) - before_s[name] for name, process in processes.items()}
    return [Row(f"idle: {name}", 100 * s / IDLE_S, "% of a core", IDLE_PERCENT) for name, s in worked_s.items()]


# The yardstick of batching: the same batch in bare torch loops, without hosts, links or independence from the batch.
# The nets' own code runs, not the hosts' runners: torch at its best.

PROMPT = b"The old man looked at the sea and said that"
TOKENS = 128  # to generate, if they fit


class TextRequests:
    """Text requests, and the bare loops that generate as much."""

    unit = "tokens/s"

    def __init__(self, settings: HostBenchSettings) -> None:
        """Raises InputError, CheckpointError."""
        self.settings, models = settings, find_bundle(settings.checkpoint).models
        written_by = {"sweep": "chain", "chunked": "chain", "ar": "ar"}
        self.models = {mode: models[name] for mode, name in written_by.items() if name in models}
        room = min(read_manifest(path).text_architecture.positions for path in self.models.values()) - len(PROMPT)
        self.units = settings.max_tokens or min(TOKENS, room)
        if self.units > room:
            raise InputError(f"--max-tokens must be 1 to {room} to fit the context, not {self.units}")

    async def ask(self, client: AsyncClient, mode: str, seed: int) -> Result:
        return await client.generate(PROMPT, mode=mode, max_tokens=self.units, seed=seed)

    def bare(self, mode: str) -> Callable[[], None]:
        """A loop over a batch of requests."""
        directory = self.models[mode]
        manifest = read_manifest(directory)
        known = torch.tensor([tokens_of(tokenizer_of(directory), PROMPT)] * self.settings.batch)
        if mode == "ar":
            stages = [load_stage(directory, i) for i in range(manifest.architecture.parts)]
            return partial(_bare_ar, stages, known, self.units)
        assert manifest.partition is not None
        return partial(_bare_sweep, load_chain(directory), manifest.partition, known, self.units)


class PictureRequests:
    """Picture requests, and the bare loops that draw as many."""

    unit = "pictures/s"
    units = 1

    def __init__(self, settings: HostBenchSettings) -> None:
        """Raises InputError, CheckpointError."""
        self.settings, models = settings, find_bundle(settings.checkpoint).models
        self.models = {mode: path for mode, path in models.items() if mode in ("chain", "steps")}
        parts = max(read_manifest(path).architecture.parts for path in self.models.values())
        if not parts <= settings.levels <= MAX_LEVELS:
            raise InputError(f"--levels must be {parts} to {MAX_LEVELS}, not {settings.levels}")

    def _class_of(self, seed: int, mode: str) -> int:
        return seed % len(read_manifest(self.models[mode]).picture_architecture.classes)

    async def ask(self, client: AsyncClient, mode: str, seed: int) -> DrawnPictures:
        class_ = str(self._class_of(seed, mode))
        return await client.draw(class_, mode=mode, levels=self.settings.levels, seed=seed)

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
    """Tokens or pictures per second of the bare loop; the median over the rounds."""
    rates, loop = list[float](), subject.bare(mode)
    with torch_threads(threads):
        for _ in range(subject.settings.rounds):
            begin = time.perf_counter()
            loop()
            rates.append(subject.settings.batch * subject.units / (time.perf_counter() - begin))
    return statistics.median(rates)


def _bare_sweep(chain: list[Block], partition: NoisePartition, known: torch.Tensor, slots: int) -> None:
    """The evaluations of a sweep, batched, and the draw at its end."""
    start = known.shape[1]
    estimate = torch.zeros(len(known), slots, chain[0].architecture.code_dim)
    for block in chain:
        _, memory = block.read(known)
        sigmas = step_sigmas(*partition.range(block.index), DEFAULT_STEPS)
        for sigma in sigmas if block is chain[-1] else sigmas[:-1]:  # the next block's first is this one's last
            z = estimate + sigma * torch.randn_like(estimate)
            logits = block.denoise(z, estimate, torch.full((1, 1), sigma), memory, start)
            estimate = block.point(logits / DEFAULT_TEMPERATURE)
    for seed, rows in enumerate(logits):
        sample_tokens(rows, 1.0, seed, start)


def _bare_ar(stages: list[PipelineStage], known: torch.Tensor, count: int) -> None:
    a, last, source = stages[0].architecture, stages[-1], known
    vocabulary = Vocabulary(a.vocabulary)
    capacity = known.shape[1] + count
    caches = [new_caches(len(stage.layers), a, capacity, len(known)) for stage in stages]
    for position in range(count):
        x = source
        for stage, held in zip(stages, caches, strict=True):
            x = stage.read(x, held)
        logits = last.next_byte(x[:, -1:])[:, 0]
        source = vocabulary.decode(sample_tokens(logits, 1.0, 0, position))[:, None]


# E is not rounded between blocks, which changes pixels but no time.
def _bare_drawing(nets: list[list[PicturePart]], partition: NoisePartition, plan: DrawPlan) -> None:
    """The evaluations of a drawing, batched. nets: per noise range."""
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
