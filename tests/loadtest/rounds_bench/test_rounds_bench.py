"""`onesweep bench rounds` with real processes: over loopback, in one place, and on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.rounds_bench.bench import measure_rounds, rounds_record, rounds_table
from loadtest.rounds_bench.settings import RoundsBench, check_bench
from loadtest.rounds_bench.timeline import Busy

SETTINGS = """
steps = 8
sequences = 2
warmup_steps = 2
[architecture]
parts = 1
layers = 1
width = 16
heads = 2
context_bytes = 32
[rounds]
model = "ar"
steps_per_round = 2
deadline = "lockstep"
"""


@pytest.mark.slow
def test_what_was_planned_is_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # such a run is over before a worker has told twice how busy it was
    monkeypatch.setattr("loadtest.rounds_bench.run.busy_shares", lambda *_: [Busy("w0", 0.9, 0.05)])
    (tmp_path / "run.toml").write_text(SETTINGS)
    bench = RoundsBench(tmp_path / "run.toml", profile="loopback", up_mbps=None, within_s=100.0)
    check_bench(bench)
    figures = measure_rounds(bench, print)
    by_name = {compared.name: compared for compared in figures.compared()}
    assert by_name["bytes, coordinator"].off == 0
    assert "bytes, links" not in by_name, "loopback does not count"
    assert abs(figures.loss.mean) < 0.5, "two losses of the same model, hardly trained"
    lines = rounds_table(figures).splitlines()
    assert lines[0].startswith("next byte, nats: ")
    assert lines[1].startswith("4 rounds of 2 steps in ")
    record = json.loads(json.dumps(rounds_record(bench, figures, "onesweep bench rounds")))
    assert record["runs"]["0"]["payload_bytes"] == record["plan"]["all_bytes"]
    assert record["commit"] == figures.commit
