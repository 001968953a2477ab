"""A plan: the cost of each variant of a run's rounds, one row each."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.options import markdown
from trainer.planning.cost import (
    WorkerLink,
    coordinator_memory,
    numbers_of,
    take_inventory,
    timing_of,
    traffic_of,
    worker_memory,
)
from trainer.rounds.parts import FeatureFormat, Learner, is_fed
from trainer.rounds.spec import RunSpec, settled
from trainer.rounds.view import size


def variants(config: TrainingConfig) -> dict[str, TrainingConfig]:
    """The settings as they are, and other ways for their model and H, by name."""
    base = config.rounds
    plain = replace(
        base, outer="nesterov", overlap="none", codec="fp32", down_codec="fp32", context_by="copies", fragments=1
    )
    eager = replace(plain, overlap="eager")
    rounds = {
        "as set": base,
        "every step": replace(plain, steps_per_round=1),
        "whole blocks": replace(plain, outer="mean"),
        "diloco": plain,
        "eager": eager,
        "eager e3m0": replace(eager, codec="e3m0", down_codec="e3m0"),
    }
    if config.architecture.parts > 1 and base.model == "scorer":
        rounds["features"] = replace(plain, context_by="features")
    return {name: replace(config, rounds=own) for name, own in rounds.items()}


@dataclass(frozen=True)
class PlanRow:
    """Cost of one variant. Times and bytes of a worker are those of the worker that has most."""

    name: str
    rounds: int
    steps_per_round: int
    up_bytes: int
    down_bytes: int
    all_bytes: int  # of all workers, both ways, as the coordinator counts them
    seconds: float
    used: float  # share of the rounds in which a worker trains
    worker_bytes: int
    coordinator_bytes: int


def make_plan(config: TrainingConfig, link: WorkerLink, step_s: float) -> list[PlanRow]:
    """All rows. Raises ConfigError.

    step_s: seconds of a local step of the worker that computes most; others' are in proportion to their passes.
    """
    # A worker makes the same steps in every variant, in rounds of different lengths.
    steps = settled(config).steps
    config = replace(config, steps=steps, rounds=replace(config.rounds, rounds=0))
    passes = max(part.passes for part in take_inventory(config))
    return [_row(name, own, link, step_s / passes) for name, own in variants(config).items()]


def describe(config: TrainingConfig) -> str:
    """A sentence about the model."""
    a, rounds = config.architecture, config.rounds
    parts = take_inventory(config)
    return (
        f"{numbers_of(parts):,} parameters, {len(parts)} parts with {rounds.replicas} workers each: {a.parts} x "
        f"{a.layers} layers, width {a.width}; {settled(config).steps} steps of each worker"
    )


def _row(name: str, config: TrainingConfig, link: WorkerLink, pass_s: float) -> PlanRow:
    config = settled(config)
    parts, rounds = take_inventory(config), config.rounds
    traffic = [traffic_of(part, rounds) for part in parts]
    pairs = list(zip(parts, traffic, strict=True))
    timings = [timing_of(each, rounds, link, pass_s * part.passes) for part, each in pairs]
    timing = max(timings, key=lambda timing: timing.seconds)
    return PlanRow(
        name=name,
        rounds=rounds.rounds,
        steps_per_round=rounds.steps_per_round,
        up_bytes=max(each.up_in_all for each in traffic),
        down_bytes=max(each.down_in_all for each in traffic),
        all_bytes=rounds.replicas * sum(each.up_in_all + each.down_in_all for each in traffic),
        seconds=timing.seconds,
        used=timing.used,
        worker_bytes=max(worker_memory(part, each, rounds) for part, each in pairs),
        coordinator_bytes=coordinator_memory(parts, traffic, rounds),
    )


STEPS = 5  # measured steps, after one that warms up. Their median counts, for the chunks differ from step to step.


def measure_step(config: TrainingConfig, corpus: Corpus) -> float:
    """Seconds of a local step, by a few real ones of the part that computes most. Raises ConfigError, DataError."""
    spec, parts = RunSpec.of(config, corpus), take_inventory(config)
    index = max(range(len(parts)), key=lambda i: parts[i].passes)
    task, form, times = spec.task(index, corpus, config.seed), FeatureFormat.of(config), list[float]()
    if is_fed(spec.config, index):  # zeros cost as much
        task.neighbours.feed = lambda step: torch.zeros(form.sequences, form.positions, form.width)
    learner = Learner(task, spec.config)
    for step in range(STEPS + 1):
        begin = time.monotonic()
        learner.train(step, 1)
        times.append(time.monotonic() - begin)
    return statistics.median(times[1:])


HEAD = ("way", "rounds", "up", "down", "all", "hours", "used", "worker", "coordinator")


def table(rows: Sequence[PlanRow]) -> list[str]:
    """Markdown: bytes of a worker and of all, hours, share used, and memory."""
    cells = [
        [
            row.name,
            f"{row.rounds} x {row.steps_per_round}",
            *map(size, (row.up_bytes, row.down_bytes, row.all_bytes)),
            f"{row.seconds / 3600:.3g}",
            f"{row.used:.1%}",
            *map(size, (row.worker_bytes, row.coordinator_bytes)),
        ]
        for row in rows
    ]
    return markdown(HEAD, cells)
