"""`onesweep bench host`: its rows are there and add up; nothing here asserts how fast anything is."""

import json
from pathlib import Path

import pytest

from loadtest.commands import Row
from loadtest.host import ring
from loadtest.host.ring import TimedAnswer, alone_rows
from tests.conftest import Run
from tests.loadtest.conftest import check_refused
from tests.stages.pictures.tiny import tiny_picture_bundle

SAMPLES = [TimedAnswer(b"text", 4, 10.0 + i, 4.0, 2) for i in range(20)]


def measured(onesweep: Run, path: Path, *options: object) -> dict[str, float]:
    """Values of a run, by the names of their rows."""
    ended, record = onesweep("bench", "host", *options, "--json", path), json.loads(path.read_text())
    assert (ended.code, record["bench"]) == (0, "host")
    assert record["machine"]["cores"] > 0
    assert all(row["name"] in ended.out for row in record["rows"])
    return {row["name"]: row["value"] for row in record["rows"]}


@pytest.fixture
def brief_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SETTLE_S", 0.0)
    monkeypatch.setattr(ring, "IDLE_S", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("brief_idle")
def test_a_whole_run(bundle: Path, tmp_path: Path, onesweep: Run) -> None:
    sizes = ["--max-tokens", 8, "--batch", 4, "--rounds", 2]
    values = measured(onesweep, tmp_path / "host.json", "--checkpoint", bundle, *sizes)
    kinds = [name.partition(":")[0] for name in values]
    assert list(dict.fromkeys(kinds)) == ["sweep", "chunked", "ar", "idle"]
    assert {"ar: a sweep on top of the model", "sweep: 4 requests at once", "idle: router"} <= set(values)
    assert all(value > 0 for name, value in values.items() if not name.startswith("idle"))
    together, bare = values["ar: 4 requests at once"], values["ar: bare torch loop over 4"]
    assert values["ar: at once over the bare loop"] == pytest.approx(together / bare)


@pytest.mark.slow
@pytest.mark.usefixtures("brief_idle")
def test_a_bundle_that_draws_is_measured_in_pictures(tmp_path: Path, onesweep: Run) -> None:
    options = ["--checkpoint", tiny_picture_bundle(tmp_path / "bundle"), "--batch", 4, "--rounds", 2]
    values = measured(onesweep, tmp_path / "host.json", *options, "--levels", 3)
    assert {name.partition(":")[0] for name in values} == {"chain", "steps", "idle"}
    check_refused(onesweep("bench", "host", *options, "--levels", 2), "--levels must be 3 to 256, not 2")


def test_rows_are_medians_and_the_overhead_is_per_sweep() -> None:
    rows = {row.name: row for row in alone_rows("sweep", 3, "tokens/s", SAMPLES)}
    assert rows["sweep: latency"].value == 19.5
    assert rows["sweep: latency over compute"].value == pytest.approx(19.5 / 4)
    name = "sweep: a sweep on top of the model"
    assert rows[name] == Row(name, (19.5 - 4) / 2, "ms", 8.0)
    assert alone_rows("ar", 1, "tokens/s", SAMPLES)[2].at_most is None, "the aim is for a ring of three"


@pytest.mark.parametrize(("value", "met"), [(2.5, "yes"), (2.5 + 1e-15, "yes"), (2.6, "no")])
def test_a_row_shows_whether_its_aim_is_met(value: float, met: str) -> None:
    assert Row("a byte", value, "ms", 2.5).cells == ("a byte", f"{value:.3g}", "ms", "2.5", met)
    assert Row("a byte", 1234.5, "ms").cells == ("a byte", "1,234", "ms", "", "")
