"""A graft on a GPU: what a machine without one can say about it, and what one with a GPU must come to."""

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onesweep.stages.errors import Interrupted
from onesweep.stages.grafting.block import CPU_ROWS, rows_at_once
from onesweep.trainer.blocks.run import StepLoss
from onesweep.trainer.grafting.store import GraftSettings
from onesweep.trainer.grafting.training import Graft, GraftTask, train_block
from tests.trainer.grafting.fake_gpu import main
from tests.trainer.processes import ended, forked

WITHIN_S = 300.0
CONFIG = """
steps = 3
valid_windows = 2
bfloat16 = false
log_every = 1
save_every_s = 0.0
warmup_steps = 1
chunks = [1, 4]
architecture = { context_length = 12, code_dim = 8, condition_dim = 8 }
"""
BLOCKS: list[tuple[object, ...]] = [
    ("--block", 0, "--steps", 1),
    ("--block", 1, "--trains", "block", "--anchor-head", "own"),
    ("--block", 2, "--trains", "block", "--steps", 1),
]
ROUNDING = 1e-4
"""Between the same sums in another order."""
FAR = 2e-3
"""Nats between a CPU and a GPU after a few steps in float32."""


@dataclass(frozen=True)
class Commands:
    """`onesweep train graft` with the same settings, here, and in a process with a device of its own."""

    onesweep: Callable[..., Any]
    checkpoint: Path
    data: Path
    config: Path

    def words(self, out: Path, *more: object) -> list[str]:
        paths = ("--checkpoint", self.checkpoint, "--out", out, "--config", self.config, "--data", self.data)
        return [str(word) for word in ("train", "graft", *paths, "--rank", 2, "--threads", 1, *more)]

    def here(self, out: Path, *more: object) -> str:
        done = self.onesweep(*self.words(out, *more))
        assert not done.message
        return str(done.out)

    def there(self, out: Path, *commands: tuple[object, ...], stop_at: int = -1) -> tuple[int | None, str, str]:
        """Exit code, words and errors of these commands in one process; the last one asks itself to stop in a step."""
        stops = [-1] * (len(commands) - 1) + [stop_at]
        lines = [self.words(out, *more, "--device", "pretend") for more in commands]
        said, errors = out.with_suffix(f".said{stop_at}"), out.with_suffix(f".errors{stop_at}")
        code = ended(forked(said, errors, main, list(zip(stops, lines, strict=True))), WITHIN_S)
        return code, said.read_text(), errors.read_text()


@pytest.fixture
def commands(onesweep: Callable[..., Any], checkpoint: Path, tmp_path: Path, text_file: Path) -> Commands:
    config = tmp_path / "graft.toml"
    config.write_text(CONFIG)
    return Commands(onesweep, checkpoint, text_file, config)


def assert_alike(a: Path, b: Path) -> None:
    """All tensors that are stored in one directory and in the other."""
    ours, theirs = (sorted(path.rglob("*.safetensors")) for path in (a, b))
    assert ours
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(load_file(one), load_file(other), atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.slow
def test_everything_is_done_on_another_device_and_comes_to_the_same(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That device computes like the CPU; what stayed behind on the CPU would have been refused.

    The second block is begun there, continued here, and ended there.
    """
    here, there, block = tmp_path / "here", tmp_path / "there", (*BLOCKS[1], "--json")
    asked = [(*block, "--json") for block in BLOCKS]
    expected = [json.loads(commands.here(here, *more)) for more in asked]
    commands.here(here, "--export", here / "chain")

    code, said, first_errors = commands.there(there, asked[0], block, stop_at=0)
    assert code == Interrupted.exit_code, first_errors
    assert "stopped and saved at step 1" in first_errors
    loss = GraftTask.loss

    def stopping(self: GraftTask, step: int) -> StepLoss:
        assert step == 1
        os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(GraftTask, "loss", stopping)
        assert "stopped and saved at step 2" in commands.onesweep(*commands.words(there, *block)).message
    code, more, errors = commands.there(there, *asked[1:], ("--export", there / "chain"))
    assert code == 0, errors

    left, decoder = said + more, json.JSONDecoder()
    for figures in expected:
        found, end = decoder.raw_decode(left)
        assert_figures(found, figures)
        left = left[end:].lstrip()
    assert left.startswith(f"{there / 'chain'}: a chain of 3 blocks")
    assert_alike(here, there)
    reads = re.findall(r"reads (\d+)", first_errors + errors)
    assert reads == ["2", "3", "3", "3"], "of a step: loss, the anchor's where there is one, gradient's norm"


def assert_figures(found: Any, expected: Any) -> None:
    """The same JSON, but for the rounding of its numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_figures(found[name], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_figures(one, other)
    else:
        assert found == (pytest.approx(expected, rel=ROUNDING) if isinstance(expected, float) else expected)


def test_a_device_that_is_not_there_is_a_sentence(commands: Commands, tmp_path: Path) -> None:
    for name, message in (("tpu", "--device must be cpu, cuda or cuda:N"), ("cuda:99", "no device cuda:99 here")):
        done = commands.onesweep(*commands.words(tmp_path / "out", "--block", 0, "--device", name))
        assert message in done.message
    assert not (tmp_path / "out").exists()


def test_a_gpu_holds_the_odds_of_more_positions() -> None:
    assert rows_at_once(torch.device("cpu"), 49_152) == CPU_ROWS
    assert 10 * CPU_ROWS < rows_at_once(torch.device("cuda"), 49_152) < 32 * 128
    assert rows_at_once(torch.device("cuda"), 1 << 30) == CPU_ROWS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")
def test_a_gpu_learns_as_a_cpu_does(opened: Callable[..., Graft]) -> None:
    for settings in (GraftSettings(0), GraftSettings(1, "block", "own"), GraftSettings(2, "block")):
        cpu, gpu = (train_block(opened(device, device=device), settings) for device in ("cpu", "cuda"))
        assert gpu == pytest.approx(cpu, abs=FAR)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")
def test_a_gpu_trains_in_bfloat16_and_a_cpu_goes_on(
    opened: Callable[..., Graft], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_block(opened("whole", bfloat16=True), GraftSettings(1))
    loss = GraftTask.loss

    def stopping(self: GraftTask, step: int) -> StepLoss:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, step)

    monkeypatch.setattr(GraftTask, "loss", stopping)
    with pytest.raises(Interrupted, match="step 2"):
        train_block(opened("parts", device="cuda", bfloat16=True), GraftSettings(1))
    monkeypatch.setattr(GraftTask, "loss", loss)
    parts = train_block(opened("parts", bfloat16=True), GraftSettings(1))
    assert parts == pytest.approx(whole, abs=0.1)
