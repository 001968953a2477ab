"""`onesweep bench losses`: what it reads, what it says, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from onesweep.loadtest.host import losses as bench
from onesweep.loadtest.host import stage
from onesweep.loadtest.host.losses import LossBench
from onesweep.loadtest.host.settings import LossSettings
from onesweep.serving.cli.__main__ import main
from onesweep.stages.errors import CodecError, InputError
from tests.serving.pretrained import ARCHITECTURE, write_model

TEXT = "the old man said that the sea and the ship and the ship and the sea. " * 40


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in this process, and short."""
    monkeypatch.setattr(stage, "MEASURE_S", 0.01)
    monkeypatch.setattr(bench, "alone", lambda function, *arguments: function(*arguments))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(TEXT)
    return tmp_path / "text"


def test_a_token_models_losses_are_those_of_its_own_tokens(here: None, tmp_path: Path, text: Path) -> None:
    write_model(tmp_path / "model")
    settings = LossSettings(checkpoint=tmp_path / "model", text=text, backends=("torch",), symbols=256)
    exact, rounded = LossBench(settings).measure()
    assert (exact.codec, rounded.codec) == ("fp32", "int8")
    assert 0.5 * math.log(ARCHITECTURE.vocabulary) < exact.nats < 4 * math.log(ARCHITECTURE.vocabulary)
    assert 0 < abs(rounded.nats - exact.nats) < 0.5
    assert exact.divergence == 0 < rounded.divergence < 0.05
    between, width = ARCHITECTURE.parts - 1, ARCHITECTURE.width
    assert (exact.symbol_bytes, rounded.symbol_bytes) == (between * 4 * width, between * (width + 28))
    assert exact.step_ms > 0
    windows = bench._windows(settings, *bench._manifest(settings.checkpoint))
    assert [len(window) for window in windows] == [256]
    windows = bench._windows(replace(settings, symbols=600), *bench._manifest(settings.checkpoint))
    assert [len(window) for window in windows] == [256, 256]
    assert windows[0] != windows[1]


def test_the_command_has_a_row_for_each_backend_and_codec(
    here: None, bundles: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    file = tmp_path / "losses.json"
    arguments = ["--checkpoint", str(bundles / "own"), "--text", str(text), "--symbols", "64", "--json", str(file)]
    assert main(["bench", "losses", *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    backends = ("torch", "onnxruntime", "onnxruntime-int8")
    assert [(row["backend"], row["codec"]) for row in rows] == [(b, c) for b in backends for c in ("fp32", "int8")]
    nats = {(row["backend"], row["codec"]): row["nats"] for row in rows}
    assert nats["onnxruntime", "fp32"] == pytest.approx(nats["torch", "fp32"], abs=1e-4)
    assert nats["onnxruntime-int8", "fp32"] == pytest.approx(nats["torch", "fp32"], abs=0.05)
    assert "+0.0000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"text": Path("nowhere.txt")}, InputError, "is not a file"),
        ({"backends": ("tpu",)}, InputError, "unknown backend 'tpu'"),
        ({"codecs": ("zip",)}, CodecError, "unknown codec of hidden states 'zip'"),
    ],
)
def test_settings_are_checked_before_the_run(bundles: Path, text: Path, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        LossBench(replace(LossSettings(checkpoint=bundles / "own", text=text), **changes)).check()


def test_a_text_without_two_symbols_is_refused(here: None, bundles: Path, text: Path) -> None:
    text.write_text("x")
    with pytest.raises(InputError, match="shorter than two symbols"):
        LossBench(LossSettings(checkpoint=bundles / "own", text=text, backends=("torch",))).measure()
