"""`onesweep bench quality` over a real ring, on a tiny bundle; and mistakes that end in a sentence."""

import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.quality import text
from loadtest.quality.text import HUMAN, QualityRow, gram_entropy, option_of, ranked
from loadtest.report.table import Estimate
from serving.client.variants import ModeVariant
from serving.modes.frontier import read_frontier
from stages.checkpoint.manifest import read_manifest
from tests.conftest import Run
from tests.loadtest.conftest import check_refused

COMMAND = ["bench", "quality", "--count", 4, "--bytes", 20, "--prompts"]


class RareBytes:
    """A judge for which letters are cheap."""

    name = "rare-bytes"

    def judge(self, prompts: Sequence[bytes], outputs: Sequence[bytes], progress: Any) -> list[float]:
        progress(len(outputs))
        return [sum(2.0 if chr(byte).isalpha() else 8.0 for byte in output) for output in outputs]


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "check_judge", lambda: None)
    monkeypatch.setattr(text, "open_judge", RareBytes)


@pytest.fixture(scope="session")
def python_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid.txt, cut from Python's own documentation."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "valid.txt").write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_whole_run(bundle: Path, python_docs: Path, tmp_path: Path, onesweep: Run) -> None:
    variants = ("sweep:steps=2", "chunked:chunk=5:steps=1")
    modes = ["--modes", ",".join(f"{each}:temperature={t}" for each in variants for t in (0.5, 1))]
    files = ["--json", tmp_path / "q.json", "--write", tmp_path / "frontier.json"]
    ended = onesweep(*COMMAND, python_docs, "--checkpoint", bundle, *modes, *files)
    record = json.loads((tmp_path / "q.json").read_text())
    rows = {row["mode"]: row for row in record["rows"]}
    assert list(rows) == [
        "sweep:temperature=0.5:steps=2",
        "sweep:temperature=1.0:steps=2",
        "chunked:chunk=5:temperature=0.5:steps=1",
        "chunked:chunk=5:temperature=1.0:steps=1",
        HUMAN,
    ]
    assert [row["sweeps"] for row in rows.values()] == [1, 1, 4, 4, None]
    assert rows[HUMAN]["judge_bits_per_byte"] < min(row["judge_bits_per_byte"] for row in record["rows"][:-1])
    assert all(row["judge_bits_per_byte_low"] <= row["judge_bits_per_byte_high"] for row in record["rows"])
    assert all(row["host_ms"] > 0 and row["wire_bytes"] > 0 for row in record["rows"][:-1])
    assert (ended.code, "judge rare-bytes" in ended.out) == (0, True)
    frontier = read_frontier(tmp_path / "frontier.json")
    assert [option.mode for option in frontier.options] == ["sweep", "chunked"], "one temperature of each"
    assert frontier.weights["chain"] == read_manifest(bundle / "chain").digest()
    assert frontier.human_bits == rows[HUMAN]["judge_bits_per_byte"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--modes", "chain"], "unknown mode 'chain'"),
        (["--levels", "12"], "--levels needs --pictures"),
        (["--count", "1000000"], "the text has room for"),
        (["--pictures", "x.npz"], "give either --prompts with held-out text, or --pictures"),
        (["--write", "/no/such/folder.json"], "choose another --write FILE"),
    ],
)
def test_a_wrong_option_is_explained(python_docs: Path, onesweep: Run, arguments: list[str], sentence: str) -> None:
    check_refused(onesweep(*COMMAND, python_docs, *arguments), sentence)


def test_entropy_is_low_for_repeated_text() -> None:
    assert gram_entropy([b"abcd" * 50]) == pytest.approx(2.0, abs=0.01)
    assert gram_entropy([b"abcdefgh"]) > gram_entropy([b"aaaaaaaa"]) == 0.0
    assert gram_entropy([b"abc"]) == 0.0


def test_the_temperature_with_the_entropy_of_human_text_is_chosen() -> None:
    cold, warm, other = (
        ModeVariant("ar").having(temperature=0.5),
        ModeVariant("ar").having(temperature=1.0),
        ModeVariant("sweep"),
    )
    entropies = {cold.label: 9.0, warm.label: 11.5, other.label: 5.0, HUMAN: 12.0}
    rows = {label: QualityRow(label, Estimate(1.0, 1.0, 1.0), entropy) for label, entropy in entropies.items()}
    assert ranked({cold: [], other: [], warm: []}, rows) == [other, warm]


def test_an_option_has_the_chosen_settings_and_the_cost_of_texts() -> None:
    def result(sweeps: int, host_ms: float, wire: int) -> Any:
        counts = {"sweeps": sweeps, "output_tokens": 10, "chunk": 8, "wire_bytes_total": wire, "scorer": ""}
        return SimpleNamespace(**counts, host_seconds=host_ms / 1000, compute_ms=host_ms + 4.0)

    results = [result(2, 40.0, 100), result(4, 60.0, 300)]
    option = option_of(ModeVariant("chunked"), results, Estimate(2.0, 1.5, 2.5))
    assert (option.mode, dict(option.settings)) == ("chunked", {"chunk": 8, "temperature": 0.8})
    assert (option.bits, option.bits_low, option.bits_high) == (2.0, 1.5, 2.5)
    assert (option.sweeps, option.sweeps_high, option.output_tokens) == (3.0, 4, 10)
    assert (option.host_ms, option.router_ms, option.wire_bytes) == (50.0, 4.0, 200.0)
