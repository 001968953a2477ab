"""`onesweep bench leak`: its two attackers read what can be read, and no more."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onesweep.loadtest.host import leak
from onesweep.loadtest.host.leak import LeakBench, LinearProbe, SymbolShare
from onesweep.loadtest.host.settings import LeakSettings
from onesweep.serving.cli.__main__ import main
from onesweep.stages.errors import CodecError, InputError, OnesweepError

TEXT = "the old man said that the sea and the ship and the ship and the sea. " * 40


@pytest.fixture
def settings(bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeakSettings:
    monkeypatch.setattr(leak, "WINDOW", 16)
    (tmp_path / "text").write_text(TEXT)
    return LeakSettings(
        checkpoint=bundles / "own", text=tmp_path / "text", symbols=640, noises=(50.0,), kept=(1,), candidates=40
    )


def test_a_probe_reads_what_is_linear_in_a_state_and_nothing_in_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding, mixing = torch.randn(50, 8, generator=generator), torch.randn(8, 24, generator=generator)
    symbols = torch.randint(50, (3, 400), generator=generator)
    states = embedding[symbols] @ mixing
    probe = LinearProbe(states[:2], embedding, symbols[:2])
    assert (probe.likeliest(states[2], 3)[:, 0] == symbols[2]).float().mean() > 0.95
    noise = torch.randn(states.shape, generator=generator)
    read = LinearProbe(noise[:2], embedding, symbols[:2]).likeliest(noise[2], 1)[:, 0]
    assert (read == symbols[2]).float().mean() < 0.1


def test_a_share_has_the_interval_of_its_windows() -> None:
    share = SymbolShare.of(torch.tensor([[True, True], [True, False], [False, False], [True, False]]))
    assert (share.mean, share.half) == pytest.approx((0.5, 1.96 * (1 / 6) ** 0.5 / 2))
    assert str(SymbolShare(0.5, 0.123)) == "50.0 ± 12.3"


def test_states_give_the_text_away_until_noise_drowns_it(
    settings: LeakSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "leak.json"
    flags = {"--symbols": "640", "--noise": "50", "--kept": "1", "--candidates": "40", "--json": str(path)}
    command = ["bench", "leak", "--checkpoint", str(settings.checkpoint), "--text", str(settings.text)]
    assert main([*command, *(word for pair in flags.items() for word in pair)]) == 0
    assert "today it reads 100 %" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    by_kind = {(r["model"], r["layers"], r["codec"], r["noise"]): r for r in rows}
    plain, noisy = by_kind["ar", 1, "fp32", 0.0], by_kind["ar", 1, "fp32", 50.0]
    assert plain["nearest"]["mean"] == 1.0
    assert noisy["nearest"]["mean"] < 0.6
    assert plain["probe"]["mean"] > noisy["probe"]["mean"]
    assert noisy["nats"] != plain["nats"]  # this model has learnt nothing, so neither need be the larger one
    assert {r["model"] for r in rows} == {"ar", "chain"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"text": Path("nowhere.txt")}, InputError, "is not a file"),
        ({"codecs": ("zip",)}, CodecError, "unknown codec of hidden states 'zip'"),
        ({"noises": (0.0,)}, InputError, "--noise must be above 0"),
        ({"noises": (float("nan"),)}, InputError, "--noise must be above 0"),
        ({"kept": (0,)}, InputError, "--kept must be at least 1"),
    ],
)
def test_settings_are_checked_before_the_run(
    settings: LeakSettings, changes: dict[str, Any], error: type[OnesweepError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LeakBench(replace(settings, **changes)).check()


def test_a_text_that_is_too_short_is_refused(settings: LeakSettings) -> None:
    with pytest.raises(InputError, match="give 9 windows of 16 symbols, and 10 are needed"):
        LeakBench(replace(settings, symbols=144)).measure()
