"""`onesweep bench wan` with a bundle that draws: what is refused, and whole runs."""

import json
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.loadtest.conftest import check_refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--modes", "steps:int3"), "'int3' is not a setting"),
        (("--bytes", 8), "draws pictures: give --levels"),
        (("--text", "novel"), "draws pictures: give --levels"),
        (("--temperature", 1), "draws pictures: give --levels"),
        (("--levels", "0"), "--levels '0' must be positive integers"),
        (("--levels", "6", "--modes", "steps", "--hosts", 4), "hosts cannot share 3 blocks"),
    ],
)
def test_a_wrong_option_is_explained(drawing: Path, bench: Run, options: tuple[object, ...], says: str) -> None:
    check_refused(bench(drawing, "--profile", "loopback", *options), says)


@pytest.mark.slow
def test_pictures_are_measured_without_a_lab(drawing: Path, tmp_path: Path, bench: Run) -> None:
    options = ("--profile", "loopback", "--at-once", 2, "--hosts", 2)
    modes = ("--modes", "chain,steps,steps:int8,local", "--levels", 3, "--requests", 2, "--seed", 5)
    ended = bench(drawing, *modes, *options, "--json", tmp_path / "r.json")
    assert ended.code == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert {(sample["seed"], sample["class"]) for sample in record["samples"]} >= {(5, "zero"), (6, "one")}
    rows = record["rows"]
    assert all((row["requests"], row["failures"], row["unit"]) == (4, 0, "levels") for row in rows)
    # K + 1 trips
    assert [(row["mode"], row["sweeps"]) for row in rows] == [
        ("chain", 1),
        ("steps", 4),
        ("steps:int8", 4),
        ("local", 0),
    ]
    assert "trips" in ended.out
    assert "tokens/s" not in ended.out
