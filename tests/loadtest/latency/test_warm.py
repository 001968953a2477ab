"""`onesweep bench warm`: first requests in a real lab, and what is refused before one is made."""

import json
from pathlib import Path

import pytest

from onesweep.loadtest.lab.lab import lab_problem
from onesweep.loadtest.latency.first_token import SITUATIONS
from onesweep.serving.cli.__main__ import main


@pytest.mark.slow
@pytest.mark.skipif(bool(lab_problem()), reason=lab_problem() or "there is one")
def test_every_situation_has_a_row(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "warm.json"
    few = ["--profile", "lan", "--modes", "sweep", "--bytes", "8", "--rounds", "1", "--idle-s", "0.2"]
    assert main(["bench", "warm", "--checkpoint", str(bundle), *few, "--json", str(path)]) == 0
    assert "after reconnect" in capsys.readouterr().out
    rows = {row["situation"]: row for row in json.loads(path.read_text())["rows"]}
    assert tuple(rows) == SITUATIONS
    for row in rows.values():
        assert row["failures"] == 0
        assert row["p50_ms"] >= row["floor_ms"] > 0
    assert rows["steady"]["requests"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--idle-s", "-1"], "--idle-s must be from 0 to 3600, not -1"),
        (["--bytes", "0"], ", what the context leaves after the prompt, not 0"),
        (["--modes", "swep"], "unknown mode 'swep' in --modes"),
        (["--profile", "moon"], "no profile 'moon'"),
        (["--json", "/nowhere/w.json"], "cannot write /nowhere/w.json"),
    ],
)
def test_refused_with_a_sentence(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    assert main(["bench", "warm", *options]) == 2
    assert says in capsys.readouterr().err
