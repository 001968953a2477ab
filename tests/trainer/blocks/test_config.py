from pathlib import Path

import pytest

from stages.errors import ConfigError
from trainer.blocks.config import load_config


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, "steps = 7\nseed = 3\n[architecture]\nwidth = 64\n")
    config = load_config(path, steps=9, seed=None, architecture={"layers": 3})
    assert (config.steps, config.seed) == (9, 3)
    assert (config.architecture.width, config.architecture.layers) == (64, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 3", "unknown setting 'speed' (did you mean seed?); available:"),
        ("[architecture]\ndepth = 3", "[architecture]: unknown setting 'depth'"),
        ("architecture = 3", "must be a section"),
        ("learning_rate = nan", "learning_rate must be a finite number"),
        ("matrix_learning_rate = -0.1", "matrix_learning_rate must be a finite number of at least 0"),
        ('matrix_optimizer = "sgd"', "matrix_optimizer must be one of muon, adamw"),
        ("self_condition = 1.5", "self_condition must be a number from 0 to 1, not 1.5"),
        ("steps = -1", "steps must be a whole number"),
        ("seed = 99999999999999999", "seed must be a whole number"),
        ("sequences = 0", "sequences must be"),
        ("chunks = []", "chunks must have at least one entry, not []"),
        ("chunks = [-1]", "chunks must each be a whole"),
        ("bfloat16 = 1", "bfloat16 must be true or false"),
        ("[noise]\nsigma_min = nan", "sigma_min must be a finite number"),
        ("[noise]\nsigma_min = 20", "below sigma_max"),
        ("[noise]\noverlap = 1", "overlap must be"),
        ("[noise]\ncode_seed = -1", "code_seed must be"),
        ('[noise]\npartition = "fair"', "partition must be one of"),
        (f"steps = 0x{'f' * 5000}", "is not TOML"),
        ("[lookahead]\nrefresh_every = 0", "refresh_every must be a whole number from 1"),
        ("[rounds]\nsteps_per_round = 0", "steps_per_round must be a whole number from 1 to 2147483648, not 0"),
        ("[architecture]\nwidth = 63", ".toml [architecture]: width 63 must be an even multiple of heads 4"),
        ('[rounds]\ncodec = "int4"', "codec must be one of fp32, int8, e3m0, top7, top32, not 'int4'"),
        ("[rounds]\nfragments = 1", "[rounds]: unknown setting 'fragments'"),
        ("[rounds]\nquorum = 1.5", "quorum must be a number from 0 to 1, not 1.5"),
        ("[rounds]\nouter_momentum = 1.0", "outer_momentum must be a number from 0 to 0.999, not 1.0"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(toml(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="flags: steps must be"):
        load_config(None, steps=-3)
