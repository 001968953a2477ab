"""`onesweep bench frontier`: what is refused before a lab is made, and a whole run in a real one."""

import json
from pathlib import Path
from typing import Any

import pytest

from onesweep.loadtest.lab.lab import lab_problem
from onesweep.loadtest.quality.panel import JUDGED, QualityRow
from onesweep.loadtest.report.table import Estimate
from onesweep.serving.cli.__main__ import main
from onesweep.serving.modes.frontier import read_frontier
from onesweep.stages.checkpoint.manifest import read_manifest
from tests.loadtest.conftest import check_refused

needs_a_lab = pytest.mark.skipif(bool(lab_problem()), reason=lab_problem() or "there is one")


def quality(path: Path, bundle: Path, **changes: Any) -> Path:
    """What the ruler would have written of two modes."""
    rows = [
        QualityRow(m, spec=m, figures={JUDGED: Estimate(b)}) for m, b in (("sweep", 4.0), ("ar", 2.0), ("human", 1))
    ]
    weights = {name: read_manifest(bundle / name).digest() for name in ("chain", "ar")}
    record = {"quality": "run", "judge": "judge", "weights": weights, "rows": [row.to_record() for row in rows]}
    path.write_text(json.dumps(record | changes))
    return path


def frontier(bundle: Path, *options: object) -> list[str]:
    return ["bench", "frontier", "--checkpoint", str(bundle), "--bytes", "8", *map(str, options)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profiles", "atlantis"), "atlantis"),
        (("--profiles", ","), "--profile is empty"),
        (("--requests", 0), "--requests must be at least 1"),
        (("--hosts", 9), "--hosts must be 1 to 2"),
        (("--budgets", "x"), "--budgets 'x' must be numbers"),
        (("--budgets", "0"), "--budgets must be milliseconds from 1"),
        (("--modes", "chunked"), "'chunked': what its text is worth was not measured; there are sweep, ar"),
        (("--modes", "magic"), "unknown mode 'magic'"),
        (("--quality", "/nowhere/q.json"), "cannot read /nowhere/q.json"),
        (("--judge-on", "."), "leave one of them out"),
        (("--prompts", "/nowhere"), "no text at /nowhere"),
        (("--json", "/nowhere/r.json"), "cannot write /nowhere/r.json"),
        (("--svg", "/nowhere/r.svg"), "choose another --svg FILE"),
        (("--write", "/nowhere/f.json"), "choose another --write FILE"),
    ],
)
def test_refused_with_a_sentence(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    says: str,
) -> None:
    monkeypatch.setattr("onesweep.loadtest.workload.testbed.temporary_lab", lambda *_: pytest.fail("a lab was made"))
    monkeypatch.setattr("onesweep.loadtest.frontier.run.lab_problem", lambda: "")
    given = () if "--quality" in options else ("--quality", quality(tmp_path / "q.json", bundle))
    check_refused(capsys, frontier(bundle, *given, *options), says)


def test_no_quality(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(frontier(bundle)) == 2
    assert "give --quality FILE, as `onesweep bench quality --json FILE` writes" in capsys.readouterr().err


def test_other_weights(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(frontier(bundle, "--quality", quality(tmp_path / "q.json", bundle, weights={"ar": "f" * 64}))) == 2
    assert "measured with other weights (ar/ ffffffffffff" in capsys.readouterr().err


def test_no_lab_can_be_made(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onesweep.loadtest.frontier.run.lab_problem", lambda: "there is no /dev/net/tun")
    assert main(frontier(bundle, "--quality", quality(tmp_path / "q.json", bundle))) == 1
    assert capsys.readouterr().err == "onesweep: there is no /dev/net/tun\n"


@needs_a_lab
def test_a_whole_run(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sea was calm, and nobody was there. " * 40)
    out = {name: tmp_path / f"f.{name}" for name in ("json", "svg", "html")}
    options = ("--profiles", "links-20", "--requests", 1, "--quality", quality(tmp_path / "q.json", bundle))
    files = [part for name, path in out.items() for part in (f"--{name}", path)]
    written = tmp_path / "frontier.json"
    budgets = ("--budgets", "2,5000,60000", "--prompts", text, "--write", written)
    assert main(frontier(bundle, *options, *budgets, *files)) == 0
    record = json.loads(out["json"].read_text())
    points = {point["spec"]: point for point in record["points"]}
    assert {spec: point["sweeps"] for spec, point in points.items()} == {"sweep": 1, "ar": 8}
    assert points["sweep"]["seconds"] > 0.03, "three links of 10 ms"
    assert points["ar"]["seconds"] > 8 * 0.02, "two for each byte"
    assert points["ar"]["exact_bits"] == record["exact_bits"]["ar"] > 0
    too_small, *fitting = record["auto"]
    assert "below one sweep" in too_small["error"]
    assert [(point["picked"], point["kept"], point["as_good"]) for point in fitting] == [({"ar": 1}, True, True)] * 2
    assert [option.label for option in read_frontier(written).options] == ["sweep", "ar"]
    assert out["svg"].read_text().startswith("<svg")
    assert "worst / budget" in out["html"].read_text()
    table = capsys.readouterr().out
    assert "| mode | sweeps | s, links-20 | judge bits |" in table
