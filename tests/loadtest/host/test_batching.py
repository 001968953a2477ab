"""`onesweep bench batching`, on a tiny bundle."""

import json
from pathlib import Path

import pytest

from onesweep.loadtest.host.batching import BatchingBench, BatchingFigures
from onesweep.loadtest.host.settings import BatchingSettings
from onesweep.serving.cli.__main__ import main
from tests.stages.pictures.tiny import tiny_picture_bundle


@pytest.mark.slow
def test_a_whole_run(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batching.json"
    sizes = ["--batch", "4", "--max-tokens", "12", "--rounds", "2"]
    assert main(["bench", "batching", "--checkpoint", str(bundle), *sizes, "--json", str(path)]) == 0
    assert "together / bare" in capsys.readouterr().out
    figures = json.loads(path.read_text())["figures"]
    assert [f["mode"] for f in figures] == ["sweep", "ar"]
    for f in figures:
        assert min(f["alone"], f["together"], f["bare"], f["bare_one_core"]) > 0
        assert f["ratio"] == pytest.approx(f["together"] / max(f["bare"], f["bare_one_core"]))


def test_pictures_are_the_same_alone_and_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, path = tiny_picture_bundle(tmp_path / "bundle"), tmp_path / "batching.json"
    bench = ["bench", "batching", "--checkpoint", str(bundle)]
    assert main([*bench, "--batch", "4", "--levels", "3", "--rounds", "2", "--json", str(path)]) == 0
    assert "4 requests at once, a picture of 3 levels each, 2 times" in capsys.readouterr().out
    figures = json.loads(path.read_text())["figures"]
    assert [f["mode"] for f in figures] == ["chain", "steps"]
    assert all(min(f["alone"], f["together"], f["bare"], f["bare_one_core"]) > 0 for f in figures)
    assert main([*bench, "--levels", "2"]) == 2
    assert "--levels must be 3 to 256, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(("together", "met"), [(70.0, "yes"), (69.0, "no")])
def test_the_target_is_seven_tenths_of_the_bare_loop(together: float, met: str) -> None:
    figures = BatchingFigures("ar", 16, alone=10.0, together=together, bare=100.0, bare_one_core=60.0)
    assert BatchingBench(BatchingSettings()).table([figures]).endswith(met)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batch", "0"], "--batch must be from 1 to 64, not 0"),
        (["--batch", "65"], "--batch must be from 1 to 64, not 65"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--max-tokens", "500"], "--max-tokens must be 1 to 469, what the context leaves after the prompt, not 500"),
        (["--json", "/no/such/folder.json"], "cannot write /no/such/folder.json: No such file or directory"),
    ],
)
def test_mistakes_end_in_a_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert main(["bench", "batching", *arguments]) == 2
    assert sentence in capsys.readouterr().err
