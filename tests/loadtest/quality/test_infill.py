"""Gaps in held-out text: what is measured of those who fill them."""

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from onesweep.loadtest.quality.infill import FIGURES
from onesweep.loadtest.report.page import shown
from onesweep.serving.cli.__main__ import main
from onesweep.stages.checkpoint.checkpoint import save_ar, write_manifest
from onesweep.stages.checkpoint.gate import PROBE_TEXT
from onesweep.stages.checkpoint.manifest import Manifest
from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.pipeline import ArModel


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.txt and valid.txt."""
    root = tmp_path_factory.mktemp("text")
    raw = "\n".join(topics.values()).encode()
    (root / "train.txt").write_bytes(raw[: 1 << 17])
    (root / "valid.txt").write_bytes(raw[1 << 17 : (1 << 17) + 8000])
    return root


@pytest.fixture(scope="module")
def filling(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, with a local model."""
    root = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("filling") / "bundle"))
    model = ArModel(Architecture(parts=1, layers=1, width=16, heads=2, context_length=96, code_dim=8, condition_dim=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    write_manifest(root / "local", Manifest("ar", model.architecture, (None,), probe_text=PROBE_TEXT))
    save_ar(root / "local", model.eval())
    return root


def test_gaps_are_filled_and_measured(
    filling: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, page = tmp_path / "record.json", tmp_path / "page.html"
    given = ["--prompts", text, "--weights", filling, "--judge", "ngram", "--lengths", "2,5", "--count", "6"]
    small = ["--prompt-bytes", "20", "--modes", "infill:candidates=8,ar,local"]
    assert main(list(map(str, ["bench", "infill", *given, *small, "--json", record, "--html", page]))) == 0
    out = capsys.readouterr().out
    rows = json.loads(record.read_text())["rows"]
    assert [(row["mode"], row["length"]) for row in rows] == [
        (mode, length) for length in (2, 5) for mode in ("infill:candidates=8", "ar", "local", "human")
    ]
    for row in rows:
        assert row["n"] == 6
        assert all(row[name] is not None for name in FIGURES if not name.endswith("_minus_ar")), row
        for name in ("joined_minus_ar", "between_minus_ar"):
            assert (row[name] is None) == (row["mode"] == "ar")
        whole = row["span_bits"] * row["length"] + row["after_bits"] * 32
        assert whole == pytest.approx(row["joined_bits"] * (row["length"] + 32), rel=0.02)
        if row["mode"] == "human":
            assert row["exact_match"] == 1
            assert row["sweeps"] is None
        if row["mode"].startswith("infill"):
            assert row["sweeps"] == 1
            assert 1 <= row["effective_samples"] <= 8
    assert "human" in out
    samples = json.loads(record.read_text())["samples"]
    assert shown(samples[0]["suffix"]) in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", "0"], "--lengths must be at least 1, not 0"),
        (["--lengths", ""], "--lengths is empty"),
        (["--lengths", "a"], "--lengths 'a' must be numbers"),
        (["--modes", "magic"], "unknown mode 'magic'"),
        (["--count", "100000"], "the text has room for"),
        (["--judge", "oracle"], "unknown judge 'oracle'"),
        (["--html", "/none/page.html"], "choose another --html FILE"),
    ],
)
def test_a_wrong_value_is_named(
    text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["bench", "infill", "--prompts", str(text), *arguments]) == 2
    assert says in capsys.readouterr().err
