"""A plan: one row for each way of making rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.planning.bounds import Bounds, bounds_of
from trainer.planning.inventory import fit_width, numbers_of, take_inventory
from trainer.planning.link import Link
from trainer.planning.memory import WorkerMemory, coordinator_memory, worker_memory
from trainer.planning.timing import Timing, timing_of
from trainer.planning.traffic import Traffic, traffic_of, wire_bytes
from trainer.planning.variant import Variant, variants
from trainer.rounds.feature_format import check_features
from trainer.rounds.fleet import is_above_zero
from trainer.rounds.frame import settled


@dataclass(frozen=True)
class Row:
    """What one way comes to. Of the workers, figures are those of the one that has most."""

    name: str
    config: TrainingConfig
    traffic: Sequence[Traffic]
    """Part by part."""
    timing: Timing
    memory: WorkerMemory
    coordinator_bytes: int
    bounds: Bounds
    """Of `all_bytes`, where rounds do not wait for everybody."""

    @property
    def up_bytes(self) -> int:
        return max(traffic.up_in_all for traffic in self.traffic)

    @property
    def down_bytes(self) -> int:
        return max(traffic.down_in_all for traffic in self.traffic)

    @property
    def all_bytes(self) -> int:
        """Of all workers, both ways, as the coordinator counts."""
        replicas = self.config.rounds.replicas
        return replicas * sum(traffic.up_in_all + traffic.down_in_all for traffic in self.traffic)

    @property
    def all_wire_bytes(self) -> float:
        """The same with the headers of everything that carries it."""
        replicas = self.config.rounds.replicas
        return replicas * sum(_wire(traffic) for traffic in self.traffic)

    def to_record(self) -> dict[str, Any]:
        rounds = self.config.rounds
        return {
            "name": self.name,
            "rounds": rounds.rounds,
            "steps_per_round": rounds.steps_per_round,
            "codec": rounds.codec,
            "down_codec": rounds.down_codec,
            "overlap": rounds.overlap,
            "fragments": rounds.fragments,
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "all_bytes": self.all_bytes,
            "least_bytes": self.bounds.least,
            "most_bytes": self.bounds.most,
            "all_wire_bytes": round(self.all_wire_bytes),
            "seconds": self.timing.seconds,
            "round_s": self.timing.round_s,
            "used": self.timing.used,
            "worker": {**asdict(self.memory), "total": self.memory.total},
            "coordinator_bytes": self.coordinator_bytes,
        }


def shape_model(config: TrainingConfig, params: float | None, blocks: int | None, layers: int | None) -> TrainingConfig:
    """The model to plan for: the settings' own, cut into `blocks` and as wide as `params` wants it.

    :param layers: of the whole model. Raises ConfigError.
    """
    architecture = config.architecture
    blocks = architecture.parts if blocks is None else blocks
    layers = architecture.parts * architecture.layers if layers is None else layers
    if blocks < 1 or layers < 1 or layers % blocks:
        raise ConfigError(
            f"{layers} layers cannot be cut into {blocks} equal blocks; give --layers as a multiple of --block-count"
        )
    config = replace(config, architecture=replace(architecture, parts=blocks, layers=layers // blocks))
    if params is None:
        return config
    if not is_above_zero(params):
        raise ConfigError(f"--params must be a finite number above 0, not {params!r}")
    return fit_width(config, params)


def staff(config: TrainingConfig, workers: int | None, planned: bool) -> TrainingConfig:
    """`workers` shared out among the parts. Raises ConfigError where that does not come out even.

    :param planned: whether the settings say how many replicas a part may have.
    """
    parts = 1 if config.rounds.model == "ar" else config.architecture.parts
    if workers is None:
        return config
    if workers < parts or workers % parts:
        raise ConfigError(
            f"{workers} workers do not share {parts} blocks equally; give --workers as a multiple of --block-count"
        )
    replicas = workers // parts
    if planned and replicas > config.rounds.replicas:
        raise ConfigError(
            f"{workers} workers are {replicas} a block, and the settings plan for replicas = {config.rounds.replicas}; "
            f"give at most {parts * config.rounds.replicas} workers, or more replicas"
        )
    return replace(config, rounds=replace(config.rounds, replicas=replicas))


def make_plan(
    config: TrainingConfig, link: Link, step_s: float, as_set: bool = False, activations: int | None = None
) -> list[Row]:
    """All rows. Raises ConfigError.

    :param step_s: seconds of a local step as the settings have it, of the worker that computes most; lookahead takes
        longer by the passes that it makes more.
    :param as_set: whether the settings themselves are a row; :param activations: bytes of one step, measured.
    """
    if not is_above_zero(step_s):
        raise ConfigError(
            f"a step takes a finite number of seconds above 0, not {step_s!r}; give --step-s, or --measure"
        )
    check_features(config)
    if config.steps < 1 and not config.rounds.rounds:
        raise ConfigError("a run has at least one step: give --steps above 0")
    # in every variant a worker makes the same steps, in rounds of another length
    steps = settled(config).steps
    config = replace(config, steps=steps, rounds=replace(config.rounds, rounds=0))
    passes = max(part.passes for part in take_inventory(config))
    return [_row(variant, link, step_s / passes, passes, activations) for variant in variants(config, as_set)]


def describe(config: TrainingConfig) -> str:
    """The model in a sentence."""
    a, rounds = config.architecture, config.rounds
    parts = take_inventory(config)
    return (
        f"{numbers_of(parts):,} parameters, {len(parts)} parts with {rounds.replicas} workers each: {a.parts} x "
        f"{a.layers} layers, width {a.width}; {settled(config).steps} steps of each worker"
    )


def _row(variant: Variant, link: Link, pass_s: float, passes: int, activations: int | None) -> Row:
    """:param passes: of the step whose activations were measured."""
    config = settled(variant.config)
    parts, rounds = take_inventory(config), config.rounds
    traffic = [traffic_of(part, rounds) for part in parts]
    pairs = list(zip(parts, traffic, strict=True))
    timings = [timing_of(each, rounds, link, pass_s * part.passes) for part, each in pairs]
    memories = [worker_memory(part, each, rounds) for part, each in pairs]
    known = activations if max(part.passes for part in parts) == passes else None
    return Row(
        variant.name,
        config,
        traffic,
        max(timings, key=lambda timing: timing.seconds),
        replace(max(memories, key=lambda memory: memory.total), activations=known),
        coordinator_memory(parts, traffic, rounds),
        bounds_of(parts, rounds),
    )


def _wire(traffic: Traffic) -> float:
    own = sum(
        traffic.rounds * wire_bytes(up) + count * wire_bytes(down)
        for up, down, count in zip(traffic.ups, traffic.downs, traffic.fetched, strict=True)
    )
    own += traffic.rounds * wire_bytes(traffic.features)
    return wire_bytes(traffic.first) + own + traffic.refreshes * sum(map(wire_bytes, traffic.copies))
