"""`onesweep bench memory`, on a block of a megabyte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.memory import MemoryFigures, ServerMemory, memory_record, memory_table
from loadtest.random_chain import block_bytes, sized_architecture, write_random_chain
from serving.cli import main
from stages.checkpoint import load_block


def figures(loaded_rss: int) -> MemoryFigures:
    idle, loaded = ServerMemory(100, 90, 80, 110), ServerMemory(loaded_rss, 1090, 1080, 1110)
    return MemoryFigures(1000, 16, idle, loaded, idle, loaded)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.json"
    assert main(["bench", "memory", "--block-mb", "1", "--json", str(path)]) == 0
    assert "(loaded - idle) / block" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert 0.8e6 < record["block_bytes"] < 1.4e6
    for server in ("idle", "loaded", "idle_after", "loaded_after"):
        assert 0 < record[server]["uss"] <= record[server]["pss"] <= record[server]["rss"] <= record[server]["peak"]


@pytest.mark.parametrize(("rss", "met"), [(1400, True), (1401, False)])
def test_the_ratio_counts_what_the_block_added(rss: int, met: bool) -> None:
    assert memory_record(figures(rss))["ratios"]["ready"] == {
        "rss": (rss - 100) / 1000,
        "pss": 1.0,
        "uss": 1.0,
        "peak": 1.0,
    }
    assert memory_record(figures(rss))["met"] is met
    assert memory_table(figures(rss)).endswith("yes" if met else "no")


def test_random_chains_pass_their_gate_and_have_the_size_asked_for(tmp_path: Path) -> None:
    architecture = sized_architecture(4)
    write_random_chain(tmp_path, architecture)
    assert load_block(tmp_path, 0).architecture == architecture
    assert block_bytes(tmp_path) == pytest.approx(4e6, rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--block-mb", "0"], "--block-mb must be at least 1, not 0"),
        (["--json", "/no/such/folder.json"], "cannot write /no/such/folder.json: No such file or directory"),
    ],
)
def test_mistakes_end_in_a_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert main(["bench", "memory", *arguments]) == 2
    assert sentence in capsys.readouterr().err
