"""The section [rounds]: what it takes, and the sentence for what it does not."""

import re
from pathlib import Path

import pytest

from stages.errors import ConfigError
from trainer.blocks.config import RoundSettings, load_config


def test_a_file_sets_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 90\n[rounds]\nsteps_per_round = 40\ncodec = "e3m0"\nquorum = 1\n')
    rounds = load_config(path).rounds
    assert (rounds.steps_per_round, rounds.codec, rounds.quorum) == (40, "e3m0", 1)
    assert rounds.count(90) == 3
    assert RoundSettings(rounds=7).count(90) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps_per_round": 0}, "steps_per_round must be a whole number from 1 to 2147483648, not 0"),
        ({"replicas": 2.0}, "replicas must be a whole number from 1 to 1024, not 2.0"),
        ({"rounds": True}, "rounds must be a whole number"),
        ({"context_by": "mail"}, "context_by must be one of auto, copies, not 'mail'"),
        ({"codec": "int4"}, "codec must be one of fp32, int8, e3m0, top7, top32, not 'int4'"),
        ({"quorum": 1.5}, "quorum must be a number from 0 to 1, not 1.5"),
        ({"deadline_s": float("nan")}, "deadline_s must be a number"),
        ({"deadline_s": "10"}, "deadline_s must be a number"),
        ({"outer_momentum": 1.0}, "outer_momentum must be below 1, not 1.0"),
        ({"robust": "clip"}, "robust must be one of auto, none, scored, not 'clip'"),
        ({"codec": "top32", "fragments": 2}, "codecs top7 and top32 are for whole parts: give fragments = 1"),
        ({"fragments": 31}, "31 fragments do not find room in a round of 30 steps"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RoundSettings(**changes)  # type: ignore[arg-type]
