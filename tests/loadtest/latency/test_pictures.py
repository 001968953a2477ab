"""`onesweep bench wan` with a bundle that draws: what is refused, and whole runs."""

import json
from pathlib import Path

import pytest

from serving.cli.__main__ import main
from tests.loadtest.conftest import check_refused
from tests.loadtest.latency.test_bench import bench


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
def test_a_wrong_option_is_explained(
    drawing: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], says: str
) -> None:
    check_refused(capsys, bench(drawing, "--profile", "loopback", *options), says)


@pytest.mark.slow
def test_pictures_are_measured_without_a_lab(drawing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--profile", "loopback", "--at-once", 2, "--hosts", 2)
    modes = ("--modes", "chain,steps,steps:int8,local", "--levels", 3, "--requests", 2, "--seed", 5)
    assert main(bench(drawing, *modes, *options, "--json", tmp_path / "r.json")) == 0
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
    table = capsys.readouterr().out
    assert "trips" in table
    assert "tokens/s" not in table
