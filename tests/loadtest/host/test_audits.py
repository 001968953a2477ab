"""`onesweep bench audit`: its arithmetic, and a host that computes wrongly."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onesweep.loadtest.faults.faulty_host import turned
from onesweep.loadtest.host.audits import AuditBench, AuditCost, AuditFigures, CatchResult, cost_of, is_caught
from onesweep.loadtest.host.benchmark import TextDiffers
from onesweep.loadtest.host.settings import AuditSettings
from onesweep.serving.cli.__main__ import main
from onesweep.serving.v1 import router_pb2
from onesweep.stages.errors import ServiceError
from onesweep.stages.model.codec import CODECS, HIDDEN, StateCodec
from tests.stages.pictures.tiny import tiny_picture_bundle


@pytest.mark.parametrize("codec", [*CODECS.values(), *HIDDEN.values()], ids=lambda codec: type(codec).__name__)
def test_a_false_host_says_what_passes_every_check(codec: StateCodec) -> None:
    matrix = torch.randn(5, 16)
    payload = codec.encode(matrix)
    false = turned(payload, codec, 5)
    assert len(false) == len(payload)
    assert false != payload
    assert torch.equal(codec.decode(false, 5, 16, 1e6), codec.decode(payload, 5, 16, 1e6).roll(1, dims=1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "chain"])
def test_a_whole_run_finds_the_faulty_host(
    mode: str, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.json"
    served = bundles / "own" if mode == "ar" else tiny_picture_bundle(tmp_path / "own", ("chain", "steps"))
    sizes = ["--share", "1", "--modes", mode, "--sweeps", "4000", "--rounds", "1", "--requests", "2"]
    assert main(["bench", "audit", "--checkpoint", str(served), *sizes, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    (found,), (cost,) = record["found"], record["costs"]
    assert found["name"] == "host-1-1"
    assert found["sweeps"] <= 4000  # audits run beside the sweeps: many may pass before the first verdict
    assert record["settings"]["checkpoint"] == "own"
    assert cost["mode"] == mode
    assert cost["audited"] > 0
    assert cost["compute_share"] > 0
    assert f"at --audit 1: {found['sweeps']} (host-1-1)" in capsys.readouterr().out


def test_the_table_says_who_was_found_and_what_it_cost() -> None:
    bench = AuditBench(AuditSettings(Path("weights")))
    figures = AuditFigures(
        [CatchResult(12, "host-1-1"), CatchResult(100, "")],
        [AuditCost("sweep", 7, 100.0, 120.0, 101.0, 300.0, 0.104, 0.98)],
    )
    table = bench.table(figures)
    assert "at --audit 0.05: 12 (host-1-1), 100 (not found)" in table
    assert "p50 12, p90 inf, most inf; found in 100 sweeps or fewer: 1 of 2" in table
    assert "none is a wrong one with probability 0.0059" in table
    assert table.splitlines()[-1].split() == ["sweep", "7", "100.0", "101.0", "120.0", "300.0", "0.104", "0.98"]
    assert bench.record(figures)["settings"]["checkpoint"] == "weights"


def test_an_honest_host_that_is_accused_is_no_find() -> None:
    liar, honest = (
        router_pb2.HostStatus(name=name, reason="is quarantined: another host computes otherwise") for name in "ab"
    )
    assert is_caught([liar, router_pb2.HostStatus(name="b", ready=True)], "a")
    assert not is_caught([router_pb2.HostStatus(name="a", ready=True)], "a")
    with pytest.raises(ServiceError, match="b is honest, and was accused: is quarantined"):
        is_caught([liar, honest], "a")


class Arm:
    """A client of a deployment that needs so long and writes so."""

    def __init__(self, latency_ms: float, output: bytes = b"text") -> None:
        self.result = SimpleNamespace(latency_ms=latency_ms, output=output, hosts=[SimpleNamespace(compute_ms=10.0)])
        self.asked = 0

    def generate(self, prompt: bytes, **settings: Any) -> Any:
        self.asked += 1
        return self.result

    def status(self) -> Any:
        return SimpleNamespace(
            hosts=[], audits=router_pb2.Audits(sweeps=2 * self.asked, audited=self.asked, compute_ms=self.asked)
        )


def test_both_arms_are_compared_after_a_request_that_warms_up() -> None:
    settings = AuditSettings(Path("weights"), requests=4)
    plain, audited = Arm(100.0), Arm(120.0)
    cost = cost_of(settings, "sweep", plain, audited)  # type: ignore[arg-type]
    assert (cost.audited, cost.plain_p50_ms, cost.audited_p50_ms, cost.compute_share) == (4, 100.0, 120.0, 0.1)
    assert cost.sweep_cost == 0.2
    assert plain.asked == audited.asked == 5
    with pytest.raises(TextDiffers, match="mode sweep, seed 0: with audits the answer is another"):
        cost_of(settings, "sweep", plain, Arm(120.0, b"other"))  # type: ignore[arg-type]
