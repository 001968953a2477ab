"""Experiments on rounds, each a table: what is varied, on which model, and against which arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stages.architecture import Architecture
from stages.errors import InputError
from trainer.config import PROFILES, NoiseConfig, TrainingConfig
from trainer.rounds.comparison import Arm, arms
from trainer.rounds.fleet import Fleet
from trainer.rounds.settings import RoundSettings
from trainer.rounds.tables import OF_ROUNDS

Grid = Mapping[str, Sequence[str]]
"""Names to values; every combination is an arm."""


@dataclass(frozen=True)
class Experiment:
    """One question, and the arms that answer it."""

    question: str
    config: TrainingConfig
    grids: tuple[Grid, ...]
    against: str
    """The arm from which differences are taken."""
    losses: tuple[str, ...] = ("next_byte",)
    columns: tuple[str, ...] = OF_ROUNDS
    one_place: bool = False

    def arms(self, steps: int | None = None) -> list[Arm]:
        """Each arm once. steps: local steps of a worker, if not those of the experiment."""
        config = replace(self.config, steps=self.config.steps if steps is None else steps)
        found = [
            arm
            for number, grid in enumerate(self.grids)
            for arm in arms(config, Fleet(), grid, self.one_place and not number)
        ]
        return list({arm.name: arm for arm in found}.values())


SMALL = replace(
    PROFILES["onesweep"],
    architecture=Architecture(parts=2, layers=1, width=48, heads=4, context_bytes=64),
    rounds=RoundSettings(
        model="ar",
        steps_per_round=16,
        outer="nesterov",
        outer_rate=0.7,
        outer_momentum=0.5,
        late="drop",
        codec="fp32",
        down_codec="fp32",
    ),
    steps=480,
    sequences=4,
    warmup_steps=24,
    bfloat16=False,
    valid_windows=256,
)
"""One part, two replicas, thirty rounds: small enough for one core."""
LIGHT_BED = replace(SMALL, rounds=replace(SMALL.rounds, outer_rate=1.0, outer_momentum=0.3))
LONGER = replace(
    SMALL,
    architecture=Architecture(parts=1, layers=1, width=96, heads=3, context_bytes=128),
    rounds=RoundSettings(outer="nesterov"),
    steps=1350,
    warmup_steps=30,
)
"""A block by itself in 45 rounds: one of those that `bench rounds` trains."""
SCORER = replace(SMALL, architecture=replace(SMALL.architecture, parts=3))
CHAIN = replace(
    SCORER,
    rounds=replace(SMALL.rounds, model="chain", replicas=1, outer="mean"),
    valid_windows=48,
)
"""Blocks alone: what is asked is not of replicas."""
CHAINED = replace(CHAIN, architecture=replace(CHAIN.architecture, context="chained"))
DEPTH_6 = replace(CHAIN, architecture=replace(CHAIN.architecture, parts=3, layers=2))
PAPERS = replace(
    DEPTH_6,
    noise=NoiseConfig(partition="equal_probability", sigma_min=1.0, sigma_max=10.0),
    chunks=PROFILES["blocktrain"].chunks,
    self_condition=PROFILES["blocktrain"].self_condition,
)
"""The recipe of BlockTrain (arXiv 2606.24722), on a small model and other text."""
OF_WORKERS = ("up MB", "down MB", "copies MB", "worker MB", "held copies MB", "GFLOP a step")
OF_PARTICIPATION = ("in time", "late", "not merged", "work", "hours")
FROM_NOISE = ("from_noise_sigma1", "from_noise_sigma1_scrambled", "from_noise", "next_byte")
PARTITIONS = ("equal_probability", "equal_entropy", "uniform")
INTERVALS = ("4", "8", "16", "64", "240", "never")
OVERLAPS = ("none", "naive", "eager")
IN_TIME = ("0.6", "0.86", "0.75", "0.4")
POLICIES = ("drop", "stale", "keep")
DILOCO: Grid = {"outer_rate": ("0.7",), "outer_momentum": ("0.9",)}
GENTLE: Grid = {"outer_rate": ("0.7",), "outer_momentum": ("0.5",)}
LIGHT: Grid = {"outer_rate": ("1",), "outer_momentum": ("0.3",)}
PLAIN: Grid = {"outer": ("mean",)}
SLOW: Grid = {"learning_rate": ("0.001",), "matrix_learning_rate": ("0.005",)}
"""The inner optimizers, that is."""
OUTERS = (DILOCO, GENTLE, PLAIN)
AHEAD: Grid = {"model": ("scorer",), "lookahead.own_weight": ("0.3",), "lookahead.ahead": ("true",)}
BY_DEPTH: tuple[Grid, ...] = tuple(
    {"architecture.parts": (parts,), "architecture.layers": (layers,)}
    for parts, layers in (("2", "3"), ("3", "2"), ("6", "1"))
)

EXPERIMENTS: Mapping[str, Experiment] = {
    "bytes": Experiment(
        "How few bytes give the CE of fp32 and whole parts?",
        SMALL,
        (
            {"codec": ("fp32",), "down_codec": ("fp32",), "steps_per_round": ("16",)},
            {"codec": ("e3m0",), "down_codec": ("e3m0",), "steps_per_round": ("16", "40")},
            {"codec": ("fp32",), "down_codec": ("fp32",), "steps_per_round": ("40",)},
            {"codec": ("int8",), "down_codec": ("int8",), "steps_per_round": ("16",)},
            {**LIGHT, "codec": ("fp32",), "down_codec": ("fp32",), "steps_per_round": ("16",)},
            {**LIGHT, "codec": ("int8",), "down_codec": ("int8",), "steps_per_round": ("16",)},
            {**LIGHT, "codec": ("e3m0",), "down_codec": ("e3m0",), "steps_per_round": ("16", "40")},
            {**LIGHT, "codec": ("ternary",), "down_codec": ("ternary",), "steps_per_round": ("16",)},
            {**PLAIN, "codec": ("fp32",), "down_codec": ("fp32",), "steps_per_round": ("16",)},
            {**PLAIN, "codec": ("ternary",), "down_codec": ("ternary",), "steps_per_round": ("16",)},
        ),
        "outer=mean codec=fp32 down_codec=fp32 steps_per_round=16",
        columns=("rounds", "up MB", "down MB", "hours"),
    ),
    "bytes-longer": Experiment(
        "The same, of a run that is longer?",
        LONGER,
        tuple({**PLAIN, "codec": (codec,), "down_codec": (codec,)} for codec in ("fp32", "int8", "e3m0", "ternary")),
        "outer=mean codec=fp32 down_codec=fp32",
        columns=("rounds", "up MB", "down MB", "hours"),
    ),
    "places": Experiment(
        "Do workers that meet once a round end where one place ends?",
        LONGER,
        (
            {**PLAIN, "steps_per_round": ("30", "10")},
            {**LIGHT, "steps_per_round": ("30",)},
            {"outer": ("radial",), "outer_momentum": ("0",), "steps_per_round": ("30",)},
        ),
        "one place",
        columns=("rounds", "up MB", "hours"),
        one_place=True,
    ),
    "late": Experiment(
        "What is late work worth?",
        LIGHT_BED,
        (
            {"in_time": ("1",)},
            {"in_time": IN_TIME, "overlap": ("patient",), "late": ("stale",)},
            *({"in_time": IN_TIME, "late": (late,)} for late in POLICIES),
        ),
        "in_time=1",
        columns=OF_PARTICIPATION,
    ),
    "late-longer": Experiment(
        "The same, of a run that is longer, with the outer step that is the default?",
        replace(LONGER, rounds=replace(LONGER.rounds, outer="mean")),
        (
            {"in_time": ("1",)},
            {"in_time": ("0.6",), "overlap": ("patient",), "late": ("stale",)},
            {"in_time": ("0.6",), "late": ("drop",)},
        ),
        "in_time=1",
        columns=OF_PARTICIPATION,
    ),
    "late-outer": Experiment(
        "Which outer optimizer bears 60 % in time, and what are workers to do that are late?",
        SMALL,
        tuple(
            {**outer, "in_time": (in_time,), **ways}
            for outer in (LIGHT, GENTLE, DILOCO)
            for in_time, ways in (
                ("1", {}),
                ("0.6", {"late": POLICIES}),
                ("0.6", {"late": ("stale", "keep", "add"), "overlap": ("patient",)}),
            )
        ),
        "outer_rate=1 outer_momentum=0.3 in_time=1",
        columns=OF_PARTICIPATION,
    ),
    "stale": Experiment(
        "Is it the discount or the momentum that makes stale work harmful?",
        SMALL,
        (
            {"in_time": ("1",)},
            {"in_time": ("0.6",), "late": ("stale",), "stale_discount": ("0.25", "0.5", "0.75")},
            {"in_time": ("0.6",), "outer": ("delayed",), "late": POLICIES},
            {"in_time": ("0.6",), "replicas": ("4",), "late": POLICIES},
            {"in_time": ("1",), "replicas": ("4",)},
        ),
        "in_time=1",
        columns=OF_PARTICIPATION,
    ),
    "interval": Experiment(
        "What does a longer sync interval cost?",
        SMALL,
        (
            {**DILOCO, "steps_per_round": INTERVALS},
            {**LIGHT, "steps_per_round": INTERVALS},
            {**PLAIN, "steps_per_round": INTERVALS},
        ),
        "one place",
        columns=("rounds", "up MB", "hours"),
        one_place=True,
    ),
    "outer": Experiment(
        "Which outer rate and momentum?",
        SMALL,
        ({"outer_rate": ("0.4", "0.7", "1"), "outer_momentum": ("0.3", "0.5", "0.7", "0.9")},),
        "outer_rate=0.7 outer_momentum=0.5",
        columns=("rounds",),
    ),
    "overlap": Experiment(
        "What does it cost to train on while the update travels?",
        SMALL,
        (
            *({**outer, "overlap": OVERLAPS} for outer in OUTERS),
            {**GENTLE, "overlap": OVERLAPS, "steps_per_round": ("4",)},
            {**GENTLE, "overlap": OVERLAPS, **SLOW},
            {**GENTLE, "overlap": OVERLAPS, "replicas": ("4",)},
        ),
        "outer_rate=0.7 outer_momentum=0.5 overlap=none",
        columns=("rounds", "busy", "hours"),
    ),
    "lookahead": Experiment(
        "Own losses, the last head's through frozen copies, or end to end, by six workers?",
        SCORER,
        (
            {"model": ("ar",), "replicas": ("2", "6")},
            {"model": ("scorer",), "lookahead.own_weight": ("1",), "lookahead.ahead": ("false",)},
            {**AHEAD, "steps_per_round": ("4",)},
            {**AHEAD, "copies_every": ("1", "4", "15")},
        ),
        "model=ar replicas=2",
        columns=OF_WORKERS,
    ),
    "order": Experiment(
        "What do blocks of a chained chain lose that learn at the same time?",
        CHAINED,
        (
            {"engine": ("in-order",)},
            {"steps_per_round": ("4", "16", "60", "240", "never")},
        ),
        "engine=in-order",
        losses=("next_byte", "block-0 next_byte", "block-1 next_byte", "from_noise_sigma1"),
        columns=("rounds", "copies MB", "hours"),
    ),
    "features": Experiment(
        "Copies of the blocks before, or their features?",
        CHAINED,
        (
            {"context_by": ("copies", "features"), "steps_per_round": ("4", "16", "60")},
            {"context_by": ("copies",), "copies_codec": ("int8",), "steps_per_round": ("4", "16", "60")},
        ),
        "context_by=copies steps_per_round=16",
        losses=("next_byte", "block-1 next_byte"),
        columns=(
            *("copies MB", "features MB", "down MB", "worker MB", "held copies MB"),
            *("GFLOP a step", "coordinator GFLOP a step"),
        ),
    ),
    "partition": Experiment(
        "How is the noise to be cut, on our range and on that of the papers?",
        DEPTH_6,
        (
            {"noise.sigma_min": ("0.15",), "noise.partition": PARTITIONS},
            {"noise.sigma_min": ("1",), "noise.partition": PARTITIONS},
        ),
        "noise.sigma_min=0.15 noise.partition=equal_entropy",
        losses=FROM_NOISE,
        columns=(),
    ),
    "blocks": Experiment(
        "Into how many blocks may six layers be cut, with the recipe of BlockTrain?",
        PAPERS,
        BY_DEPTH,
        "architecture.parts=3 architecture.layers=2",
        losses=FROM_NOISE,
        columns=("worker MB",),
    ),
}


def experiment_named(name: str) -> Experiment:
    """Raises InputError for a name that there is not."""
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
