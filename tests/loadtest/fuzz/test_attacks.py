"""HTTP/2 attacks with raw frames: whoever asks beside them gets the right text, and every process lives."""

from pathlib import Path

import pytest

from onesweep.loadtest.fuzz.attacker import ATTACKS
from onesweep.loadtest.fuzz.commands import FuzzSettings
from onesweep.loadtest.fuzz.run import ATTACK_TABLE, AttackResult, attacks_record, run_attacks
from onesweep.serving.cli.__main__ import main
from onesweep.stages.signals import run_interruptible


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attacks_cost_others_no_text(bundles: Path) -> None:
    settings = FuzzSettings(checkpoint=bundles / "scored", attacks=1.0)
    rows = run_interruptible(run_attacks(settings, lambda line: None))
    assert [words for row in rows for words in row.trouble] == []  # a wrong text, an end, a traceback, 1,500 MB
    assert [(row.target, row.attack) for row in rows] == [(p, a) for p in ("router", "host-1", "http") for a in ATTACKS]
    assert all(row.right for row in rows)
    assert {row.target for row in rows if row.sent} == {"router", "host-1", "http"}
    assert len(ATTACK_TABLE.aligned(rows).splitlines()) == len(rows) + 2
    assert attacks_record(settings, rows)["rows"][0]["attack"] == ATTACKS[0]


def test_a_finding_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = AttackResult("router", "rapid", 9, 1, 0, None, None, 1.0, 2.0, ["router, rapid: it ended"])

    async def found(*settings: object) -> list[AttackResult]:
        return [row]

    monkeypatch.setattr("onesweep.loadtest.fuzz.run.run_attacks", found)
    assert main(["bench", "fuzz", "--attacks", "1"]) == 1
    assert "1 findings: router, rapid: it ended" in capsys.readouterr().err
