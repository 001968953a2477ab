"""`onesweep train simulate`: every combination in one table."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.errors import ConfigError
from tests.trainer.small import tiny
from trainer.blocks.config import RoundSettings
from trainer.rounds.comparison import variants
from trainer.rounds.simulation import SimulatedWorkers
from trainer.rounds.spec import settled

Command = Callable[..., Any]
SETTINGS = """
sequences = 2
warmup_steps = 2
bfloat16 = false
architecture = { parts = 1, layers = 1, width = 16, heads = 2, context_length = 32 }
[rounds]
model = "ar"
steps_per_round = 2
"""


@pytest.fixture
def flags(tmp_path: Path, text_file: Path) -> list[object]:
    config = tmp_path / "run.toml"
    config.write_text(SETTINGS)
    return ["--config", config, "--data", text_file, "--steps", 4, "--threads", 1]


def test_every_combination_is_a_row(onesweep: Command, flags: list[object]) -> None:
    vary = ["--vary", "codec=fp32,e3m0", "--vary", "in_time=1,0.5", "--one-place", "--seeds", "0,1"]
    found = onesweep("train", "simulate", *flags, *vary)
    assert found.code == 0, found.message
    header, _, *rows = found.out.splitlines()
    assert header.startswith("| variant | seeds | next_byte | rounds | up MB |")
    assert [row.split(" | ")[0] for row in rows] == [
        "| one place",
        "| codec=fp32 in_time=1",
        "| codec=fp32 in_time=0.5",
        "| codec=e3m0 in_time=1",
        "| codec=e3m0 in_time=0.5",
    ]
    assert all("±" in row for row in rows)

    again = onesweep("train", "simulate", *flags, *vary, "--json")
    results = json.loads(again.out)["results"]
    up = {result["variant"]: result["traffic"]["up_bytes"] for result in results}
    assert up["codec=fp32 in_time=1"] > 6 * up["codec=e3m0 in_time=1"]
    assert results[2]["traffic"]["updates"] == {"in time": 4}
    refused = onesweep("train", "simulate", *flags, "--vary", "steps_per_round=5")
    assert refused.message.startswith("steps = 4 is less than a round of 5: set more steps, a lower steps_per_round")
    assert settled(replace(tiny, steps=90, rounds=RoundSettings(steps_per_round=40))).rounds.rounds == 3


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("codec=zip", "codec must be one of fp32, int8, e3m0, top7, top32, not 'zip'"),
        ("replicas=two", "replicas must be a whole number from 1 to 1024, not 'two'"),
        ("in_time=2", "in_time must be a number from 0 to 1, not 2"),
        ("slowness=1:0", "slowness must each be a finite number above 0, not "),
        ("noise.partitions=uniform", r"--vary \[noise\]: unknown setting 'partitions'"),
        ("seed=1", "unknown setting 'seed'"),
    ],
)
def test_an_invalid_variant_is_refused(vary: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants(tiny, [vary])


def test_the_pooled_variant_reads_the_text_of_all_replicas() -> None:
    config = replace(tiny, rounds=RoundSettings(replicas=3, codec="int8"))
    alone, rounds = variants(config, [], one_place=True)
    assert (alone.name, alone.pooled, alone.config.sequences) == ("one place", 3, 3 * tiny.sequences)
    assert (alone.config.rounds.replicas, alone.config.rounds.codec) == (1, "fp32")
    assert rounds.config == config


def test_updates_are_late_or_lost_in_the_configured_shares() -> None:
    fleet = SimulatedWorkers(in_time=0.6, lost=0.2)
    fates = [fleet.fate(0, "p", f"w-{i}") for i in range(2000)]
    assert fates == [fleet.fate(0, "p", f"w-{i}") for i in range(2000)]
    assert abs(fates.count("lost") / 2000 - 0.2) < 0.05
    assert abs(fates.count("in time") / 2000 - 0.8 * 0.6) < 0.05
    assert SimulatedWorkers(slowness=(1.0, 3.0)).training_s(3, 10) == 30.0
    assert SimulatedWorkers(latency_s=0.5, up_mbps=8.0).up_s(1_000_000) == 1.5
