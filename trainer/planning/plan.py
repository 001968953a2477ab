"""A plan: the cost of each variant of a run's rounds, one row each."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stages.errors import ConfigError
from trainer.blocks.config import CodecName, RoundSettings, TrainingConfig
from trainer.blocks.data import Corpus
from trainer.options import markdown
from trainer.planning.cost import (
    WorkerLink,
    WorkerTraffic,
    coordinator_memory,
    numbers_of,
    take_inventory,
    timing_of,
    traffic_of,
    wire_bytes,
    worker_memory,
)
from trainer.rounds.parts import FeatureFormat, Learner, is_fed
from trainer.rounds.spec import RunSpec, settled
from trainer.rounds.view import size

COARSE: tuple[CodecName, ...] = ("int8", "e3m0")

FRAGMENTS = 4  # fragments of the streaming variant, if the settings give no other number


def variants(config: TrainingConfig, as_set: bool) -> dict[str, TrainingConfig]:
    """Variants from a step-by-step exchange to fragments in four bits, by name, for the model and the H of `config`.

    as_set: begin with the settings as they are.
    """
    base = config.rounds
    plain = replace(
        base, outer="nesterov", overlap="none", codec="fp32", down_codec="fp32", context_by="copies", fragments=1
    )
    eager = replace(plain, overlap="eager")
    count = min(base.fragments if base.fragments > 1 else FRAGMENTS, base.steps_per_round)
    rounds: dict[str, RoundSettings] = {
        "every step": replace(plain, steps_per_round=1),
        "whole blocks": replace(plain, outer="mean"),
        "diloco": plain,
        **{str(codec): _travelling(plain, codec) for codec in COARSE},
        "eager": eager,
        "eager e3m0": _travelling(eager, "e3m0"),
        "fragments": replace(_travelling(eager, "e3m0"), fragments=count),
    }
    if config.architecture.parts > 1 and base.model == "scorer":
        rounds["features"] = replace(plain, context_by="features")
    return ({"as set": config} if as_set else {}) | {n: replace(config, rounds=r) for n, r in rounds.items()}


def _travelling(rounds: RoundSettings, codec: CodecName) -> RoundSettings:
    return replace(rounds, codec=codec, down_codec=codec)


@dataclass(frozen=True)
class PlanRow:
    """Cost of one variant. Times and bytes of a worker are those of the worker that has most."""

    name: str
    rounds: int
    steps_per_round: int
    codec: str
    down_codec: str
    overlap: str
    fragments: int
    up_bytes: int
    down_bytes: int
    all_bytes: int  # of all workers, both ways, as the coordinator counts them
    all_wire_bytes: int  # the same with the headers of all protocols
    seconds: float
    round_s: float
    used: float  # share of the rounds in which a worker trains
    worker_bytes: int
    coordinator_bytes: int


def make_plan(config: TrainingConfig, link: WorkerLink, step_s: float, as_set: bool = False) -> list[PlanRow]:
    """All rows. Raises ConfigError.

    step_s: seconds of a local step of the worker that computes most; others' are in proportion to their passes. as_set:
    add a row for the settings themselves.
    """
    if config.steps < 1 and not config.rounds.rounds:
        raise ConfigError("a run has at least one step: give --steps above 0")
    # A worker makes the same steps in every variant, in rounds of different lengths.
    steps = settled(config).steps
    config = replace(config, steps=steps, rounds=replace(config.rounds, rounds=0))
    passes = max(part.passes for part in take_inventory(config))
    found = variants(config, as_set)
    return [_row(name, own, link, step_s / passes) for name, own in found.items()]


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
    settings = {each: getattr(rounds, each) for each in ("codec", "down_codec", "overlap", "fragments")}
    return PlanRow(
        name=name,
        rounds=rounds.rounds,
        steps_per_round=rounds.steps_per_round,
        **settings,
        up_bytes=max(each.up_in_all for each in traffic),
        down_bytes=max(each.down_in_all for each in traffic),
        all_bytes=rounds.replicas * sum(each.up_in_all + each.down_in_all for each in traffic),
        all_wire_bytes=round(rounds.replicas * sum(map(_wire, traffic))),
        seconds=timing.seconds,
        round_s=timing.round_s,
        used=timing.used,
        worker_bytes=max(worker_memory(part, each, rounds) for part, each in pairs),
        coordinator_bytes=coordinator_memory(parts, traffic, rounds),
    )


def _wire(traffic: WorkerTraffic) -> float:
    own = sum(
        traffic.rounds * wire_bytes(up) + count * wire_bytes(down)
        for up, down, count in zip(traffic.ups, traffic.downs, traffic.fetched, strict=True)
    )
    own += traffic.rounds * (wire_bytes(traffic.features) + wire_bytes(traffic.made))
    return wire_bytes(traffic.first) + own + traffic.versions * sum(map(wire_bytes, traffic.copies))


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
