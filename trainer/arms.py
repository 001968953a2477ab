"""Ways of training a pipeline, compared on equal data, steps and batches, over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.ar import ArModel
from stages.errors import InputError
from stages.unfilled import without_memory
from trainer.config import LookaheadConfig, TrainingConfig
from trainer.cost import WorkerCost, end_to_end_cost, scorer_cost
from trainer.data import Corpus
from trainer.local import train_ar, train_scorer
from trainer.lookahead import Workers
from trainer.scores import Scorer


@dataclass(frozen=True)
class Arm:
    """One way: end to end with so many blocks' layers, or block by block."""

    name: str
    blocks: float = 0.0
    """Size of a model that is trained end to end; 0 = block by block."""
    lookahead: LookaheadConfig | None = None


WHOLE, ONE = "end-to-end", "one-block"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(ONE, 1.0),
        Arm("one-and-a-half-blocks", 1.5),
        Arm("two-blocks", 2.0),
        Arm(WHOLE, 3.0),
        Arm("own-losses", lookahead=LookaheadConfig(refresh_every=1, own_weight=1.0, ahead=False)),
        Arm("own-losses-private", lookahead=LookaheadConfig(1, own_weight=1.0, ahead=False, private_layers=1)),
        Arm("lookahead-1", lookahead=LookaheadConfig(1)),
        Arm("lookahead-10", lookahead=LookaheadConfig(10)),
        Arm("lookahead-50", lookahead=LookaheadConfig(50)),
        Arm("lookahead-200", lookahead=LookaheadConfig(200)),
        Arm("lookahead-10-copies", lookahead=LookaheadConfig(10, features="copies")),
        Arm("lookahead-50-int8", lookahead=LookaheadConfig(50, copies="int8")),
        Arm("lookahead-50-own", lookahead=LookaheadConfig(50, own_weight=0.1)),
        Arm("lookahead-50-private", lookahead=LookaheadConfig(50, own_weight=0.1, private_layers=1)),
    )
}


@dataclass(frozen=True)
class ArmResult:
    """Bits a byte on validation text, one figure a seed, and what it cost."""

    arm: str
    seeds: tuple[int, ...]
    bits_per_byte: tuple[float, ...]
    cost: WorkerCost

    def to_record(self) -> dict[str, Any]:
        return {"arm": self.arm, "seeds": self.seeds, "bits_per_byte": self.bits_per_byte, **vars(self.cost)}


def arms_named(names: Sequence[str]) -> list[Arm]:
    """Raises InputError for a name that there is not."""
    for name in names:
        if name not in ARMS:
            raise InputError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}")
    return [ARMS[name] for name in names]


def train_arm(arm: Arm, seeds: Sequence[int], config: TrainingConfig, corpus: Corpus, out: Path) -> ArmResult:
    """Train one arm for each seed, where that is not done yet. Raises OnesweepError."""
    scorer, bits = Scorer(corpus, min_context=config.architecture.context_bytes // 4), []
    blocks = config.architecture.parts
    layers = round(arm.blocks * config.architecture.layers)
    for seed in seeds:
        directory, seeded = out / f"{arm.name}-{seed}", replace(config, seed=seed)
        if arm.lookahead is None:
            stages = blocks if layers % blocks == 0 else 1
            train_ar(seeded, corpus, directory, layers, stages)
        else:
            train_scorer(replace(seeded, lookahead=arm.lookahead), corpus, directory)
        bits.append(scorer.score(directory).scores[0].bits_per_byte)
    return ArmResult(arm.name, tuple(seeds), tuple(bits), _cost(arm, layers, config))


def table(results: Sequence[ArmResult]) -> list[str]:
    """Markdown rows: mean and standard deviation over seeds, and how far each arm comes from one block to the whole."""
    by_name = {result.arm: result for result in results}
    lines = [
        "| arm | seeds | bits/byte | of the way | worker MB | copies MB | features MB | passes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cost, spread = result.cost, statistics.stdev(result.bits_per_byte) if len(result.seeds) > 1 else None
        shown = f"{statistics.mean(result.bits_per_byte):.3f}" + (f" ± {spread:.3f}" if spread is not None else "")
        lines.append(
            f"| {result.arm} | {len(result.seeds)} | {shown} | {_way(result, by_name)} | {cost.state_bytes / 1e6:.1f} "
            f"| {cost.refresh_bytes / 1e6:.0f} | {cost.feature_bytes / 1e6:.0f} | {cost.passes} |"
        )
    return lines


def _way(result: ArmResult, by_name: dict[str, ArmResult]) -> str:
    """Share of the way from one block's size to the whole, over the seeds that all three have."""
    whole, one = by_name.get(WHOLE), by_name.get(ONE)
    if whole is None or one is None:
        return ""
    common = [seed for seed in result.seeds if seed in whole.seeds and seed in one.seeds]
    if not common:
        return ""
    top, bottom, ours = (
        statistics.mean(bits for seed, bits in zip(r.seeds, r.bits_per_byte, strict=True) if seed in common)
        for r in (whole, one, result)
    )
    return f"{(bottom - ours) / (bottom - top):.0%}" if bottom != top else ""


def _cost(arm: Arm, layers: int, config: TrainingConfig) -> WorkerCost:
    architecture = replace(config.architecture, context="own")
    with without_memory():
        if arm.lookahead is None:
            return end_to_end_cost(ArModel(replace(architecture, parts=1, layers=layers)), layers, config)
        return scorer_cost(Workers(architecture, arm.lookahead), replace(config, lookahead=arm.lookahead))
