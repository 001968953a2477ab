"""Comparison of variants of rounds in one table: means over seeds, with all other settings equal."""

import itertools
import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.settings import from_toml
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.rounds.simulation import RoundsTraffic, SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec, replica_seed

TOP = ("sequences", "learning_rate", "matrix_learning_rate", "warmup_steps", "weight_decay")


@dataclass(frozen=True)
class PooledCorpus(Corpus):
    """The text of a single worker in place of all replicas: each step has all their batches, one after the other."""

    replicas: int = 1

    def batch(self, seed: int, step: int, sequences: int, length: int) -> Tensor:
        """sequences: of all replicas together."""
        each = sequences // self.replicas
        batches = [Corpus.batch(self, replica_seed(seed, i), step, each, length) for i in range(self.replicas)]
        return torch.cat(batches)


@dataclass(frozen=True)
class RoundsVariant:
    """One variant, by the settings in which it differs; none for training in one place."""

    varied: tuple[tuple[str, str], ...]
    config: TrainingConfig
    fleet: SimulatedWorkers
    pooled: int = 1  # replicas whose batches one worker reads in each step

    @property
    def name(self) -> str:
        return "one place" if self.pooled > 1 else " ".join(f"{key}={value}" for key, value in self.varied) or "rounds"


@dataclass(frozen=True)
class VariantResult:
    variant: str
    seed: int
    losses: dict[str, float]  # validation losses in nats; "next_byte" is the loss at the end of the model
    rounds: int
    workers: int
    traffic: RoundsTraffic

    @property
    def busy(self) -> float:
        """Average share of the time that a worker trained."""
        return self.traffic.busy_s / (self.workers * self.traffic.seconds)

    @property
    def work(self) -> float:
        """Merged updates as a share of one update per worker and round."""
        updates = self.traffic.updates
        merged = updates["in time"] + updates["late"] - updates["left out"]
        return merged / (self.workers * self.rounds)


def variants(config: TrainingConfig, varied: Sequence[str], one_place: bool = False) -> list[RoundsVariant]:
    """Every combination of the values of `varied`, each NAME=VALUE[,VALUE]: a name of [rounds] or of SimulatedWorkers,
    one of TOP, or SECTION.NAME.

    one_place: put training in one place first. Raises ConfigError for an unknown name, a value that it does not
    accept, or settings that virtual workers cannot have.
    """
    found = []
    if one_place and config.rounds.replicas > 1:
        pooled = config.rounds.replicas
        alone = replace(config.rounds, replicas=1, outer_rate=1.0, outer_momentum=0.0, codec="fp32", down_codec="fp32")
        pooled_config = replace(config, rounds=alone, sequences=config.sequences * pooled)
        found.append(RoundsVariant((), pooled_config, SimulatedWorkers(), pooled=pooled))
    choices = [[(each.partition("=")[0], text) for text in each.partition("=")[2].split(",")] for each in varied]
    for pairs in itertools.product(*choices):
        variant = RoundsVariant(pairs, config, SimulatedWorkers())
        for name, text in pairs:
            variant = _with(variant, name, text)
        variant.fleet.check_run(variant.config)
        found.append(variant)
    return found


def _with(variant: RoundsVariant, name: str, text: str) -> RoundsVariant:
    """The variant with one setting changed."""
    section, _, key = name.rpartition(".")
    if name in SimulatedWorkers.__dataclass_fields__:
        return replace(variant, fleet=from_toml(SimulatedWorkers, {name: _value(text)}, "--vary", variant.fleet))
    if not section and name not in TOP:
        section = "rounds"  # it rejects unknown names
    changed = {section: {key: _value(text)}} if section else {name: _value(text)}
    return replace(variant, config=from_toml(TrainingConfig, changed, "--vary", variant.config))


def _value(text: str) -> object:
    """A number or boolean as in TOML; numbers separated by colons are a list; anything else is text."""
    try:
        if ":" in text:
            return [float(part) for part in text.split(":")]
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def run_variants(variants: Sequence[RoundsVariant], seeds: Sequence[int], corpus: Corpus) -> Iterator[VariantResult]:
    """Train each variant for each seed, and yield results as they come."""
    for variant, seed in itertools.product(variants, seeds):
        text = corpus
        if variant.pooled > 1:
            text = PooledCorpus(corpus.name, corpus.train, corpus.valid, corpus.tokenizer, replicas=variant.pooled)
        spec = RunSpec.of(replace(variant.config, seed=seed), text)
        engine = Simulation(spec, text, variant.fleet)
        traffic = engine.run()
        losses = spec.evaluate(engine.published(), text)
        yield VariantResult(variant.name, seed, losses, spec.rounds, len(engine.workers), traffic)


Rows = Sequence[VariantResult]  # results of one variant, one per seed


def _mean(value: Callable[[VariantResult], float], form: str) -> Callable[[Rows], str]:
    return lambda rows: format(statistics.mean(map(value, rows)), form)


COLUMNS: Mapping[str, Callable[[Rows], str]] = {
    "rounds": lambda rows: str(rows[0].rounds),
    "up MB": _mean(lambda row: row.traffic.up_bytes / row.workers / 1e6, ".2f"),
    "down MB": _mean(lambda row: row.traffic.down_bytes / row.workers / 1e6, ".2f"),
    "copies MB": _mean(lambda row: row.traffic.copies_bytes / row.workers / 1e6, ".2f"),
    "features MB": _mean(lambda row: row.traffic.features_bytes / row.workers / 1e6, ".2f"),
    "work": _mean(lambda row: row.work, ".0%"),
    "busy": _mean(lambda row: row.busy, ".0%"),
    "hours": _mean(lambda row: row.traffic.seconds / 3600, ".2f"),
}


def table(results: Rows) -> list[str]:
    """Markdown rows, one per variant, as means over the seeds: next-byte losses in nats, for a chain also those of
    its earlier blocks, and COLUMNS.
    """
    blocks = [name for name in results[0].losses if name.endswith(" next_byte")] if results else []
    losses, by_variant = ("next_byte", *blocks[:-1]), dict[str, list[VariantResult]]()
    for result in results:
        by_variant.setdefault(result.variant, []).append(result)
    cells = []
    for variant, rows in by_variant.items():
        spreads = [_spread([row.losses.get(name, math.nan) for row in rows]) for name in losses]
        cells.append([variant, str(len(rows)), *spreads, *(column(rows) for column in COLUMNS.values())])
    head = ["variant", "seeds", *losses, *COLUMNS]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean
