"""What audits find and cost: the arithmetic of the bench, and a host that computes wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtest.audits import AuditFigures, AuditSettings, Cost, Found, audit_record, audit_table
from loadtest.false_host import turned
from stages.codec import codec_named
from stages.errors import InputError


@pytest.mark.parametrize("name", ["fp32", "int8", "int4"])
def test_a_false_host_says_what_passes_every_check(name: str) -> None:
    codec, matrix = codec_named(name), torch.randn(5, 16)
    payload = codec.encode(matrix)
    false = turned(payload, name, 5)
    assert len(false) == len(payload)
    assert false != payload
    assert torch.equal(codec.decode(false, 5, 16, 1e6), codec.decode(payload, 5, 16, 1e6).roll(1, dims=1))


def test_the_table_says_who_was_found_and_what_it_cost() -> None:
    settings = AuditSettings(Path("weights"))
    figures = AuditFigures([Found(12, "host-1-1"), Found(100, "")], [Cost("sweep", 100.0, 120.0, 101.0, 300.0, 0.104)])
    table = audit_table(settings, figures)
    assert "at --audit 0.05: 12 (host-1-1), 100 (not found)" in table
    assert "misses it in 100 sweeps with probability 0.0059" in table
    assert table.splitlines()[-1].split() == ["sweep", "100.0", "101.0", "120.0", "300.0", "0.104"]
    assert audit_record(settings, figures)["settings"]["checkpoint"] == "weights"


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(InputError, match="--share must be above 0 and at most 1"):
        AuditSettings(Path("weights"), share)
