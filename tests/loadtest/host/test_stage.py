"""`onesweep bench stage`: counts of operations, rows, errors."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from onesweep.loadtest.host import stage as bench
from onesweep.loadtest.host.settings import StageSettings
from onesweep.loadtest.host.stage import PlainBlock, StageBench, chain_losses, denoise_flops, step_flops
from onesweep.serving.cli.__main__ import main
from onesweep.stages.backends.base import NoisyPiece
from onesweep.stages.checkpoint.checkpoint import load_block
from onesweep.stages.errors import InputError
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.block import Block, Codes
from tests.stages.fake_gpu import NAME, introduced
from tests.trainer.processes import ended, forked, run_command

WEIGHTS = Path(__file__).resolve().parents[3] / "weights"
KEYS = {"backend", "dtype", "what", "batch", "ms", "floor_ms", "ratio", "memory_mb", "positions_per_s", "median_ms"}


def counted(block: Block, slots: int, start: int) -> int:
    """Torch's own count of one evaluation, AdaLN left out."""
    from torch.utils.flop_counter import FlopCounterMode

    a = block.architecture
    memory = [(torch.zeros(1, a.heads, start, a.head_dim),) * 2 for _ in block.layers]
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        z = torch.zeros(1, slots, a.code_dim)
        block.point(block.denoise(z, z, torch.ones(1, 1), memory, start))
    modulation = 2 * (a.condition_dim * 32 + a.layers * a.condition_dim * 6 * a.width)
    return counter.get_total_flops() - modulation


def test_operations_are_counted_exactly() -> None:
    a = Architecture(layers=3, width=48, heads=2, code_dim=8)
    attention = 3 * 2 * 2 * 16 * (20 + 16) * 48
    linear = 3 * 2 * 16 * 12 * 48**2
    ends = 2 * 16 * (2 * 8 * 48 + 48 * 256 + 8 * 256 + 256 * 8)
    assert denoise_flops(a, slots=16, start=20) == attention + linear + ends
    assert step_flops(a, past=20) == 3 * 2 * (12 * 48**2 + 2 * 21 * 48)


def test_operations_agree_with_torchs_counter() -> None:
    block = Block(Architecture(), 0, Codes(0, 32)).eval()
    attention = 2 * block.architecture.layers * 2 * 32 * 48 * 128  # which torch does not count on a processor
    assert denoise_flops(block.architecture, 32, 16) == counted(block, 32, 16) + attention


def test_every_backend_gives_its_rows(bundles: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "MEASURE_S", 0.01)
    monkeypatch.setattr(bench, "alone", lambda function, *arguments: function(*arguments))
    file = tmp_path / "stage.json"
    arguments = ["--checkpoint", str(bundles / "own"), "--slots", "8", "--batch", "1,3", "--json", str(file)]
    assert main(["bench", "stage", *arguments]) == 0
    record = json.loads(file.read_text())
    assert all(row.keys() >= KEYS for row in record["rows"])
    expected = {("plain", "float32"), ("plain", "bfloat16"), ("torch", "float32")}
    if importlib.util.find_spec("onnxruntime"):
        expected |= {("onnxruntime", "float32"), ("onnxruntime-int8", "int8")}
    assert {(row["backend"], row["dtype"]) for row in record["rows"]} == expected
    torch_rows = [row for row in record["rows"] if (row["backend"], row["dtype"]) == ("torch", "float32")]
    assert [(row["what"], row["batch"]) for row in torch_rows] == [
        *(("denoise", 1), ("denoise", 3)),
        *(("ar step", 1), ("ar step", 3)),
    ]
    for row in record["rows"]:
        assert row["ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
    output = capsys.readouterr().out
    assert "GFLOP/s" in output
    assert "denoising nats" in output


def pretended(bundle: Path, record: Path) -> int:
    """Both benchmarks of arithmetic, on a device that is none."""
    bench.check_device = str  # this file imported it before the device was there
    bench.MEASURE_S, bench.alone = 0.01, lambda function, *arguments: function(*arguments)
    more = ["--slots", "8", "--device", NAME, "--json", str(record)]
    with introduced() as device:
        codes = [run_command(["bench", "stage", "--checkpoint", str(bundle), "--batch", "1,3", *more])]
        assert device.reads
        assert json.loads(record.read_text())["device"] == NAME
        assert {row["backend"] for row in json.loads(record.read_text())["rows"]} == {"plain", "torch"}
        codes.append(run_command(["bench", "shapes", "--widths", "64", *more]))
    return max(codes)


@pytest.mark.slow
def test_arithmetic_of_another_device_is_measured_there(bundles: Path, tmp_path: Path, capsys) -> None:
    process = forked(tmp_path / "out", tmp_path / "err", pretended, bundles / "own", tmp_path / "record")
    assert ended(process, 120) == 0, (tmp_path / "err").read_text()
    for name in ("stage", "shapes"):
        assert main(["bench", name, "--device", "cuda:99"]) == 2
        assert "there is no device cuda:99 here" in capsys.readouterr().err


def test_a_backend_that_is_not_installed_is_named(bundles: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "MEASURE_S", 0.01)
    monkeypatch.setattr(bench, "alone", lambda function, *arguments: function(*arguments))
    for name in ("onesweep.stages.backends.onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "stage", "--checkpoint", str(bundles / "own"), "--slots", "2", "--batch", "1"]) == 0
    assert "left out, as it is not installed: onnxruntime-int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "at least 1"),
        ({"batches": (1, 0)}, "at least 1"),
        ({"slots": 513}, "the context has 512 positions"),
        ({"text": Path("nowhere.txt")}, "is not a file"),
    ],
)
def test_settings_are_checked_before_the_run(bundles: Path, changes, message) -> None:
    with pytest.raises(InputError, match=message):
        StageBench(StageSettings(bundles / "own", **changes)).check()


def test_losses_of_a_text_are_means_over_its_windows(bundles: Path, tmp_path: Path) -> None:
    def losses(*windows: bytes) -> list[tuple[float, float]]:
        (tmp_path / "text").write_bytes(b"".join(windows))
        found = chain_losses(bundles / "own", "torch", tmp_path / "text")
        assert [each.part for each in found] == ["block 0", "block 1", "block 2"]
        return [(each.next_byte_nats, each.denoise_nats) for each in found]

    first, second = (b"It was late when the rain began. " * 8)[:256], (b"0 1 2 3 4 5 6 7 8 9 " * 13)[:256]
    for both, one, other in zip(losses(first, second), losses(first), losses(second), strict=True):
        assert one != other
        assert both == pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)], rel=1e-5)
    with pytest.raises(InputError, match="fewer than two symbols"):
        losses(b"x")


def test_next_byte_losses_are_the_block_s_own(bundles: Path, tmp_path: Path) -> None:
    text = (b"It was late when the rain began. " * 8)[:256]
    (tmp_path / "text").write_bytes(text)
    block, symbols = load_block(bundles / "own" / "chain", 1), torch.tensor([list(text)])
    with torch.inference_mode():
        logits = block.next_byte(block.read(symbols)[0])[0, :-1]
    expected = float(torch.nn.functional.cross_entropy(logits, symbols[0, 1:]))
    found = chain_losses(bundles / "own", "torch", tmp_path / "text")[1]
    assert found.next_byte_nats == pytest.approx(expected, rel=1e-4)


def test_bfloat16_is_near_float32() -> None:
    torch.manual_seed(0)
    block = Block(Architecture(), 0, Codes(0, 32)).eval()
    z, estimate = torch.randn(2, 6, 32)
    piece = NoisyPiece(z, estimate, 1.0, 0, bench._caches(block, 0))
    (rounded,) = PlainBlock(block, bfloat16=True).denoise([piece])
    exact = block.denoise(z[None], estimate[None], torch.ones(1, 1), [c.stored() for c in piece.caches], 0)[0]
    assert torch.allclose(rounded.logits, exact, atol=0.1)


@pytest.mark.skipif(not WEIGHTS.is_dir(), reason="the shipped weights are not here")
def test_int8_costs_little_on_the_probe_text() -> None:
    pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    pairs = zip(*(chain_losses(WEIGHTS, name, None) for name in ("torch", "onnxruntime-int8")), strict=True)
    for exact, rounded in pairs:
        assert abs(rounded.next_byte_nats - exact.next_byte_nats) < 0.02
        assert abs(rounded.denoise_nats - exact.denoise_nats) < 0.02
        assert rounded.denoise_nats != exact.denoise_nats
