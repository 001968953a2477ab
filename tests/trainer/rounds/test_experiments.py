"""`onesweep train experiment`: arms that there are, tables that say what they mean, orders of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.burden import measure_burden
from trainer.rounds.comparison import Result, arms
from trainer.rounds.engine import engine_named
from trainer.rounds.experiments import EXPERIMENTS, Experiment
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.inprocess import Engine
from trainer.rounds.settings import RoundSettings
from trainer.rounds.store import MemoryStore
from trainer.rounds.tables import COLUMNS, table

Command = Callable[..., Any]


@pytest.fixture
def chained(tiny: TrainingConfig) -> TrainingConfig:
    architecture = replace(tiny.architecture, context="chained")
    rounds = RoundSettings(model="chain", replicas=1, outer="mean", steps_per_round=2, codec="fp32", down_codec="fp32")
    return replace(tiny, architecture=architecture, rounds=rounds, steps=4)


def result(arm: str, seed: int, nats: float) -> Result:
    return Result(arm, seed, {"next_byte": nats}, 2, 2, 0, 0, 0, {"in time": 3, "dropped": 1}, 1.0, 60.0, 0, 0, 0.0)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_every_experiment_has_the_arm_that_it_is_held_against(experiment: Experiment) -> None:
    names = [arm.name for arm in experiment.arms()]
    assert experiment.against in names
    assert len(names) == len(set(names)) > 1
    assert set(experiment.columns) <= set(COLUMNS)
    assert all(arm.config.steps == 7 for arm in experiment.arms(7))


def test_an_experiment_is_a_table_and_is_not_done_twice(
    onesweep: Command,
    tmp_path: Path,
    text_file: Path,
    tiny: TrainingConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(tiny, rounds=RoundSettings(model="ar", steps_per_round=2))
    small = Experiment("?", config, ({"codec": ("fp32", "e3m0")},), "codec=fp32", columns=("up MB",))
    monkeypatch.setattr("trainer.rounds.experiments.EXPERIMENTS", {"small": small})
    flags = ["train", "experiment", "small", "--data", text_file, "--threads", 1, "--steps", 2, "--out", tmp_path]
    found = onesweep(*flags, "--seeds", "0,1")
    assert found.code == 0, found.message
    assert [line.split(" | ")[0] for line in found.out.splitlines()[2:]] == ["| codec=fp32", "| codec=e3m0"]

    monkeypatch.setattr(Engine, "run", lambda self: pytest.fail("nothing is to be trained"))
    again = onesweep(*flags, "--seeds", "0,1,2", "--finished")
    assert again.out == found.out


def test_an_unknown_experiment_is_named(onesweep: Command) -> None:
    found = onesweep("train", "experiment", "mood")
    assert found.code == 2
    assert "unknown experiment 'mood'; choose from bytes," in found.message


def test_differences_are_paired_by_seed() -> None:
    marks, others = (2.0, 3.0, 4.0), (2.1, 3.2, 4.3)
    rows = [result("a", seed, nats) for seed, nats in enumerate(marks)]
    rows += [result("b", seed, nats) for seed, nats in enumerate(others)]
    lines = table(rows, against="a", columns=("work", "not merged"))
    assert lines[0] == "| arm | seeds | next_byte | against a | work | not merged |"
    assert lines[2] == "| a | 3 | 3.000 ± 1.000 |  | 75% | 25% |"
    # differences 0.1, 0.2, 0.3: standard deviation 0.1, t 4.30 with two degrees of freedom
    assert lines[3] == "| b | 3 | 3.200 ± 1.100 | +0.200 ± 0.248 | 75% | 25% |"
    assert "| +0.100 |" in table([*rows[:1], *rows[3:4]], against="a")[3]
    assert table([*rows[:1], result("b", 9, 1.0)], against="a", columns=())[3] == "| b | 1 | 1.000 |  |"
    assert len(table([])) == 2


def test_other_sections_and_the_order_can_be_varied(chained: TrainingConfig) -> None:
    vary = {"architecture.layers": ["2"], "noise.partition": ["uniform"], "engine": ["in-order", "inprocess"]}
    one, together = arms(chained, Fleet(), vary)
    assert (one.config.architecture.layers, one.config.noise.partition) == (2, "uniform")
    assert (one.engine, together.engine) == ("in-order", "inprocess")
    for wrong in ({"engine": ["random"]}, {"noise.partitions": ["uniform"]}, {"rounds.model": ["ar"]}):
        with pytest.raises(ConfigError):
            arms(chained, Fleet(), wrong)


def test_one_after_the_other_reads_trained_blocks(chained: TrainingConfig, corpus: Corpus) -> None:
    frame = Frame.of(chained, corpus)
    in_order = engine_named("in-order").train(frame, corpus, Fleet()).weights
    engine = Engine(frame, corpus, MemoryStore(), Fleet())
    engine.run()
    together = engine.published()
    first, second, *_ = frame.names()
    assert all(torch.allclose(in_order[first][key], tensor, atol=1e-5) for key, tensor in together[first].items())
    assert any((in_order[second][key] - tensor).abs().max() > 1e-3 for key, tensor in together[second].items())


def test_copies_are_refreshed_as_often_as_is_asked(chained: TrainingConfig, corpus: Corpus) -> None:
    moved = {}
    for every in (1, 2):
        frame = Frame.of(replace(chained, rounds=replace(chained.rounds, copies_every=every)), corpus)
        moved[every] = Engine(frame, corpus, MemoryStore(), Fleet()).run().copies_bytes
    assert moved[1] == 2 * moved[2] > 0


def test_the_burden_counts_copies_and_products(chained: TrainingConfig, corpus: Corpus) -> None:
    frame = Frame.of(chained, corpus)
    alone = replace(chained, architecture=replace(chained.architecture, context="own"))
    burden, own = measure_burden(frame, corpus), measure_burden(Frame.of(alone, corpus), corpus)
    module = frame.module(0)
    copies = (chained.architecture.parts - 1) * sum(p.numel() * 4 for p in module.parameters())
    assert (burden.copies_bytes, own.copies_bytes) == (copies, 0)
    assert burden.memory_bytes > burden.copies_bytes + 3 * sum(p.numel() * 4 for p in module.parameters())
    assert burden.step_gflop > own.step_gflop > 0
