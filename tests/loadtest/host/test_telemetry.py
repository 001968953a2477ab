"""`onesweep bench seeing`: a whole run on a tiny bundle; nothing here asserts what being watched costs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onesweep.loadtest.host.settings import TelemetrySettings
from onesweep.loadtest.host.telemetry import Scraper, TelemetryBench, TelemetryFigures, median_ratio
from onesweep.loadtest.report.table import Estimate
from onesweep.serving.cli.__main__ import main
from onesweep.serving.cli.ports import free_port_block
from onesweep.stages.errors import ServiceError


def test_a_whole_run(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "seeing.json"
    sizes = ["--users", "2", "--requests", "1", "--bytes", "4", "--rounds", "2", "--modes", "ar", "--hosts", "1"]
    sizes += ["--watched", "off,default", "--scrape-s", "0.05"]
    assert main(["bench", "seeing", "--checkpoint", str(bundle), *sizes, "--json", str(path)]) == 0
    assert "throughput" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert (record["users"], record["rounds"], record["target"]) == (2, 2, 0.98)
    assert [figures["watched"] for figures in record["figures"]] == ["off", "default"]
    assert record["figures"][0]["throughput"]["value"] == 1
    for figures in record["figures"]:
        assert figures["throughput"]["low"] <= figures["throughput"]["value"] <= figures["throughput"]["high"]


def test_a_ratio_is_that_of_the_usual_round() -> None:
    found = median_ratio([1.0, 2.0, 400.0], [1.0, 1.0, 100.0])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 4.0)


def test_a_round_too_short_for_the_clock_has_no_ratio() -> None:
    assert median_ratio([0.0, 2.0, 1.0], [0.0, 1.0, 0.0]).value == 2.0
    assert math.isnan(median_ratio([0.0], [0.0]).value)


@pytest.mark.parametrize(
    ("watched", "throughput", "met"),
    [
        ("default", Estimate(0.98), "yes"),
        ("default", Estimate(0.97), "no"),
        ("default", Estimate(0.99, 0.98, 1.0), "yes"),
        ("default", Estimate(0.99, 0.97, 1.0), "open"),
        ("default", Estimate(0.97, 0.96, 0.981), "open"),
        ("default", Estimate(0.96, 0.95, 0.97), "no"),
        ("all", Estimate(0.97), "-"),
    ],
)
def test_the_target_is_for_the_default_share(watched: str, throughput: Estimate, met: str) -> None:
    one = Estimate(1.0)
    figures = TelemetryFigures("ar", watched, 10.0, 100.0, throughput, one, one)
    assert TelemetryBench(TelemetrySettings()).table([figures]).endswith(met)


def test_a_scrape_that_does_not_happen_is_heard_of(tmp_path: Path) -> None:
    deployment: Any = SimpleNamespace(directory=tmp_path, processes={"host": 1})
    (tmp_path / "host.log").write_text("INFO ready\n")
    assert Scraper(deployment, 0.01, watched=False).addresses == []
    with pytest.raises(ServiceError, match="host does not say where its metrics are"):
        Scraper(deployment, 0.01, watched=True)
    (tmp_path / "host.log").write_text(f"INFO metrics at http://127.0.0.1:{free_port_block(1)}/metrics\n")
    scraper = Scraper(deployment, 0.01, watched=True)
    with pytest.raises(ServiceError, match="cannot read http://127"), scraper.turn():
        time.sleep(1.0)
