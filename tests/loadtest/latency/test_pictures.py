"""`onesweep bench wan` with a bundle that draws: what is refused, and whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from onesweep.loadtest.workload.arms import LEVELS, Arm, Length, ModeChoice
from onesweep.loadtest.workload.prompts import Prompts
from onesweep.serving.cli.__main__ import main
from tests.loadtest.latency.test_bench import bench, needs_a_lab
from tests.stages.pictures.tiny import tiny_picture_bundle


def test_a_drawing_is_asked_for_by_its_class() -> None:
    arm = Arm(ModeChoice("steps", "int8"), Length(6, LEVELS), prompts=Prompts("classes", ("zero", "one")))
    assert arm.call(3, 8) == {"classes": "one", "levels": 6, "seed": 8, "mode": "steps", "codec": "int8"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--modes", "ar"), "draws: mode ar does not; choose from chain, steps, local"),
        (("--modes", "chain,sweep:int8"), "draws: mode sweep:int8 does not"),
        (("--modes", "steps:int4"), "'int4' is not a setting; after the colon comes one codec (fp32, int8)"),
        (("--bytes", 8), "draws: give --levels, not --bytes"),
        (("--text", "novel"), "draws: leave out --text, --prompt and --temperature"),
        (("--temperature", 1), "draws: leave out --text, --prompt and --temperature"),
        (("--levels", "6,2"), "--levels must be 3 to 256 in mode chain, not 2"),
        (("--levels", "6", "--modes", "steps", "--hosts", 4), "--hosts must be 1 to 3"),
        (("--levels", "0", "--modes", "local"), "--levels must be 1 to 256 in mode local, not 0"),
    ],
)
def test_refused_with_a_sentence(
    drawing: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], says: str
) -> None:
    assert main(bench(drawing, "--profile", "loopback", *options)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_text_does_not_draw(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        (("--modes", "chain"), "writes: mode chain does not; choose from sweep, chunked"),
        (("--levels", 6), "writes: give --bytes or --max-tokens, not --levels"),
    ):
        assert main(bench(bundle, "--profile", "loopback", *options)) == 2
        assert says in capsys.readouterr().err
    assert main(["bench", "warm", "--checkpoint", str(bundle), "--modes", "steps"]) == 2
    assert "writes: mode steps does not" in capsys.readouterr().err
    only = tiny_picture_bundle(tmp_path / "only", ("chain",))
    assert main(bench(only, "--profile", "loopback", "--modes", "steps")) == 2
    assert "mode steps needs steps/ in" in capsys.readouterr().err


def run(drawing: Path, tmp_path: Path, *options: object) -> list[dict[str, Any]]:
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert main(bench(drawing, "--levels", 3, "--requests", 2, "--seed", 5, *options, *files)) == 0
    assert "As one process" in (tmp_path / "r.html").read_text()
    record: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert {(sample["seed"], sample["class"]) for sample in record["samples"]} >= {(5, "zero"), (6, "one")}
    rows: list[dict[str, Any]] = record["rows"]
    assert all((row["failures"], row["unit"]) == (0, "levels") for row in rows)
    # K + 1 trips; every picture is that of one process, to the last bit
    assert [(row["mode"], row["sweeps"]) for row in rows] == [
        ("chain", 1),
        ("steps", 4),
        ("steps:int8", 4),
        ("local", 0),
    ]
    assert all(row["same_as_one"] == row["compared"] == row["requests"] for row in rows)
    return rows


def test_pictures_of_hosts_are_those_of_one_process(
    drawing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = ("--modes", "chain,steps,steps:int8,local")
    rows = run(drawing, tmp_path, "--profile", "loopback", *modes, "--at-once", 2, "--hosts", 2)
    assert [row["requests"] for row in rows] == [4] * 4
    table = capsys.readouterr().out
    assert "trips" in table
    assert "4 of 4" in table
    assert "tokens/s" not in table


@needs_a_lab
def test_nothing_beats_the_floor_of_real_links(drawing: Path, tmp_path: Path) -> None:
    rows = run(drawing, tmp_path, "--profile", "links-20", "--modes", "chain,steps,steps:int8,local", "--no-control")
    assert [row["parts_ms"]["delay"] for row in rows] == [4 * 10, 13 * 10, 13 * 10, 0]
    assert all(row["ratio"] >= 1 for row in rows)
