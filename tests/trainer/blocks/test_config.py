from dataclasses import replace
from pathlib import Path

import pytest

from onesweep.stages.errors import ConfigError
from onesweep.trainer.blocks.config import PROFILES, NoiseConfig, TrainingConfig, load_config


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_wins_over_the_profile_and_flags_win_over_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'profile = "blocktrain"\nsteps = 7\nseed = 3\n[architecture]\nwidth = 64\n')
    config = load_config(path, steps=9, seed=None, context="chained")
    assert (config.profile, config.steps, config.seed) == ("blocktrain", 9, 3)
    assert (config.architecture.width, config.architecture.context) == (64, "chained")
    assert load_config(path, profile="onesweep").profile == "onesweep"


def test_blocktrain_is_the_recipe_of_the_paper() -> None:
    config = load_config(None, "blocktrain")
    assert (config.noise.sigma_min, config.noise.sigma_max) == (1.0, 10.0)
    assert config.noise.partition == "equal_probability"
    assert config.chunks == (1,), "every slot has its whole true prefix, and no other slot"
    assert config.self_condition == 0


def test_blocktrain_warns_below_sigma_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_config(toml(tmp_path, "[noise]\nsigma_min = 0.5\n"), "blocktrain")
    assert caplog.messages == ["blocktrain's figures are read at sigma 1, and sigma_min is 0.5: set it to 1"]


def test_profiles_differ_only_where_they_say() -> None:
    ours, theirs = PROFILES["onesweep"], PROFILES["blocktrain"]
    changed = {"profile": ours.profile, "noise": ours.noise, "chunks": ours.chunks}
    assert replace(theirs, **changed, self_condition=ours.self_condition) == ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 3", "unknown setting 'speed' (did you mean seed?); there are"),
        ("[architecture]\ndepth = 3", "[architecture]: unknown setting 'depth'"),
        ("architecture = 3", "must be a section"),
        ("learning_rate = nan", "learning_rate must be a finite number"),
        ("matrix_learning_rate = -0.1", "matrix_learning_rate must be a finite number of at least 0"),
        ('matrix_optimizer = "sgd"', "matrix_optimizer must be one of muon, adamw"),
        ("self_condition = 1.5", "a share"),
        ("steps = -1", "steps must be a whole number"),
        ("steps = 2.5", "steps must be a whole number"),
        ("seed = 99999999999999999", "seed must be a whole number"),
        ("sequences = 0", "sequences must be"),
        ("chunks = []", "chunks must be"),
        ("chunks = [-1]", "chunks must be"),
        ("bfloat16 = 1", "bfloat16 must be true or false"),
        ("[noise]\nsigma_min = nan", "sigma_min must be a finite number"),
        ("[noise]\nsigma_min = 20", "below sigma_max"),
        ("[noise]\noverlap = 1", "overlap must be"),
        ("[noise]\ncode_seed = -1", "code_seed must be"),
        ('[noise]\npartition = "fair"', "partition must be one of"),
        ("[architecture]\nwidth = 30", "even multiple of heads"),
        ('profile = "fast"', "unknown profile 'fast'; choose from onesweep, blocktrain"),
        ("profile = [1]", "unknown profile"),
        ("profile = true", "unknown profile True"),
        (f"steps = 0x{'f' * 5000}", "is not TOML"),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(toml(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml: No such file"):
        load_config(tmp_path / "nowhere.toml")


def test_bad_flags_are_named() -> None:
    with pytest.raises(ConfigError, match="flags: steps must be"):
        load_config(None, steps=-3)


def test_defaults_are_valid() -> None:
    assert TrainingConfig() == load_config(None)
    assert NoiseConfig().partition == "equal_entropy"
