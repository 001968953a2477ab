"""What audits find and cost: the arithmetic of the bench, and a host that computes wrongly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest.audits import (
    AuditFigures,
    AuditSettings,
    Cost,
    Found,
    audit_record,
    audit_table,
    cost_of,
    is_caught,
)
from loadtest.false_host import turned
from loadtest.seeing import TextDiffers
from serving.cli import main
from serving.v1 import router_pb2
from stages.codec import CODECS, HIDDEN, StateCodec
from stages.errors import InputError, ServiceError


@pytest.mark.parametrize("codec", [*CODECS.values(), *HIDDEN.values()], ids=lambda codec: type(codec).__name__)
def test_a_false_host_says_what_passes_every_check(codec: StateCodec) -> None:
    matrix = torch.randn(5, 16)
    payload = codec.encode(matrix)
    false = turned(payload, codec, 5)
    assert len(false) == len(payload)
    assert false != payload
    assert torch.equal(codec.decode(false, 5, 16, 1e6), codec.decode(payload, 5, 16, 1e6).roll(1, dims=1))


def test_the_table_says_who_was_found_and_what_it_cost() -> None:
    settings = AuditSettings(Path("weights"))
    figures = AuditFigures(
        [Found(12, "host-1-1"), Found(100, "")], [Cost("sweep", 7, 100.0, 120.0, 101.0, 300.0, 0.104)]
    )
    table = audit_table(settings, figures)
    assert "at --audit 0.05: 12 (host-1-1), 100 (not found)" in table
    assert "misses it in 100 sweeps with probability 0.0059" in table
    assert table.splitlines()[-1].split() == ["sweep", "7", "100.0", "101.0", "120.0", "300.0", "0.104"]
    assert audit_record(settings, figures)["settings"]["checkpoint"] == "weights"


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(InputError, match="--share must be above 0 and at most 1"):
        AuditSettings(Path("weights"), share)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--modes swep", "unknown mode 'swep'; choose from sweep,"),
        ("--requests 1", "--requests must be 2 to"),
        ("--rounds 0", "--rounds must be 1 to"),
        ("--sweeps 0", "--sweeps must be 1 to"),
        ("--share nan", "--share must be above 0"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "audit", *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_an_honest_host_that_is_accused_is_no_find() -> None:
    liar, honest = (
        router_pb2.HostStatus(name=name, reason="is taken out: another host computes otherwise") for name in "ab"
    )
    assert is_caught([liar, router_pb2.HostStatus(name="b", ready=True)], "a")
    assert not is_caught([router_pb2.HostStatus(name="a", ready=True)], "a")
    with pytest.raises(ServiceError, match="b is honest, and was accused: is taken out"):
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
        return SimpleNamespace(hosts=[], audits=router_pb2.Audits(audited=self.asked, compute_ms=self.asked))


def test_both_arms_are_compared_after_a_request_that_warms_up() -> None:
    settings = AuditSettings(Path("weights"), requests=4)
    plain, audited = Arm(100.0), Arm(120.0)
    cost = cost_of(settings, "sweep", plain, audited)  # type: ignore[arg-type]
    assert (cost.audited, cost.plain_p50_ms, cost.audited_p50_ms, cost.compute_share) == (4, 100.0, 120.0, 0.1)
    assert plain.asked == audited.asked == 5
    with pytest.raises(TextDiffers, match="mode sweep, seed 0: with audits the text is another"):
        cost_of(settings, "sweep", plain, Arm(120.0, b"other"))  # type: ignore[arg-type]
