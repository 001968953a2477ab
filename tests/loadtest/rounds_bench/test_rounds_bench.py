"""`onesweep bench rounds`: a run of real processes on loopback, held against the other commands, in this process."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.rounds_bench.bench import measure_rounds, rounds_record, rounds_table
from loadtest.rounds_bench.settings import RoundsBench, check_bench
from loadtest.rounds_bench.timeline import Busy
from serving.cli import build_parser

SETTINGS = """
steps = 80
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
steps_per_round = 20
deadline = "lockstep"
"""


def answered_here(arguments: Sequence[str], within_s: float) -> dict[str, Any]:
    """As a process would, without the seconds that it takes to start."""
    options, said = build_parser().parse_args([*arguments, "--json"]), io.StringIO()
    with contextlib.redirect_stdout(said):
        assert options.run(options) == 0
    answer: dict[str, Any] = json.loads(said.getvalue())
    return answer


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_was_planned_is_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # such a run is over before a worker has told twice how busy it was
    monkeypatch.setattr("loadtest.rounds_bench.run.busy_shares", lambda *_: [Busy("w0", 0.9, 0.05)])
    monkeypatch.setattr("loadtest.rounds_bench.bench.answer_of", answered_here)
    (tmp_path / "run.toml").write_text(SETTINGS)
    bench = RoundsBench(tmp_path / "run.toml", profile="loopback", up_mbps=None, within_s=300.0)
    check_bench(bench)
    figures = measure_rounds(bench, print)
    by_name = {compared.name: compared for compared in figures.compared()}
    assert by_name["bytes, coordinator"].off == 0
    assert "bytes, links" not in by_name, "loopback does not count"
    assert abs(figures.loss.mean) < 0.5, "two losses of the same model, hardly trained"
    lines = rounds_table(figures).splitlines()
    assert lines[0].startswith("next byte, nats: ")
    assert lines[1].startswith("4 rounds of 20 steps in ")
    record = json.loads(json.dumps(rounds_record(bench, figures, "onesweep bench rounds")))
    assert record["runs"]["0"]["payload_bytes"] == record["plan"]["all_bytes"]
    assert record["commit"] == figures.commit
