"""`onesweep bench shapes`, on shapes that are not large."""

import json
from pathlib import Path

import psutil
import pytest

from onesweep.loadtest.host.settings import ShapesSettings
from onesweep.loadtest.host.shapes import BLOCKS, ShapesBench
from onesweep.serving.cli.__main__ import main
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.block import Block, Codes

SMALL = ["--widths", "64,128", "--slots", "8"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_whole_run(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    path = tmp_path / "shapes.json"
    monkeypatch.setattr("onesweep.loadtest.host.stage.MEASURE_S", 0.01)
    assert main(["bench", "shapes", *SMALL, "--steps", "3", "--dtype", dtype, "--json", str(path)]) == 0
    assert "theirs: other hardware, other links" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert [f["width"] for f in record["figures"]] == [64, 128]
    for f in record["figures"]:
        assert f["stage_s"] == pytest.approx(3 * f["evaluation_s"])
        # links-60: four delays of 30 ms and a few bytes; a byte of AR waits for three of them
        payload_s = 8 * (32 + 4) * 8 / 100e6
        assert f["sweep_s"] == pytest.approx(BLOCKS * f["stage_s"] + 4 * (0.030 + payload_s), rel=1e-6)
        assert f["ar_token_s"] == pytest.approx(BLOCKS * f["token_s"] + 3 * (0.030 + 32 * f["width"] / 100e6), rel=1e-6)


def test_parameters_are_those_of_three_blocks() -> None:
    (figures,) = ShapesBench(ShapesSettings((64,), "lan", slots=8)).measure()
    block = Block(Architecture(layers=4, width=64, heads=1), 0, Codes(0, 32))
    assert figures.parameters == 3 * sum(p.numel() for p in block.parameters())


def test_what_does_not_fit_the_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Memory:
        available = 1 << 20

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert main(["bench", "shapes", "--widths", "128"]) == 0
    assert "width 128: not measured, a block takes 0.0 GB, 0.0 GB of memory are free" in capsys.readouterr().out
