"""`onesweep bench peers`: its rows are there and add up; nothing here asserts how fast anything is."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest.commands import Row
from loadtest.host.peers import MEMORY, PEER, _rows
from tests.conftest import Run
from tests.loadtest.conftest import check_refused
from tests.serving.pretrained import ARCHITECTURE, write_model

OURS = [{"1 at once": rate, MEMORY: 100 + rate} for rate in (30.0, 10.0, 20.0)]
THEIRS = [{"1 at once": rate, MEMORY: 2 * rate} for rate in (40.0, 50.0, 10.0)]


def test_rows_are_medians_and_their_ratio() -> None:
    unit = "tokens per CPU second"
    assert _rows("1 at once", {"onesweep": OURS, "llama.cpp": THEIRS}) == [
        Row("1 at once: onesweep", 20.0, unit),
        Row("1 at once: llama.cpp", 40.0, unit),
        Row("1 at once: onesweep over llama.cpp", 0.5, "x"),
    ]
    assert _rows(MEMORY, {"onesweep": OURS}) == [Row("most memory: onesweep", 120.0, "MB")]


def test_unusable_files_are_an_error(bundle: Path, tmp_path: Path, onesweep: Run) -> None:
    source = tmp_path / "model.gguf"
    command = ("bench", "peers", "--source", source, "--checkpoint")
    for checkpoint, sentence in [(bundle, f"{source} does not exist"), (tmp_path, "manifest.json")]:
        check_refused(onesweep(*command, checkpoint), sentence)
    source.touch()
    write_model(tmp_path / "short")
    check_refused(onesweep(*command, tmp_path / "short"), "reads 512 tokens, but this bench needs more than 512")


@pytest.mark.slow
@pytest.mark.skipif(find_spec(PEER) is not None, reason="llama.cpp would read an empty file")
def test_without_llama_cpp_only_our_rows_are_reported(tmp_path: Path, onesweep: Run) -> None:
    write_model(tmp_path / "model", architecture=replace(ARCHITECTURE, positions=1024))
    (tmp_path / "model.gguf").touch()
    given = ["--checkpoint", tmp_path / "model", "--source", tmp_path / "model.gguf", "--rounds", 1]
    ended = onesweep("bench", "peers", *given, "--json", tmp_path / "peers.json")
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    whats = ["1 at once", "4 at once", "16 at once", "a prompt of 512", "most memory"]
    assert [row["name"] for row in rows] == [f"{what}: onesweep" for what in whats]
    assert all(row["value"] > 0 for row in rows)
    assert (ended.code, f"pip install {PEER}" in ended.out) == (0, True)
