"""A training over links, and the serving of what it made."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.training.demo import DemoSettings, train_and_serve
from stages.errors import InputError


@pytest.mark.slow
def test_what_is_trained_is_served() -> None:
    said: list[str] = []
    made = train_and_serve(DemoSettings(minutes=0.2, profile="loopback", max_bytes=16), said.append)
    assert made.rounds == 2
    assert made.sweeps == 1
    assert 1.0 < made.next_byte_nats < 5.6
    assert made.moved_bytes > 1_000_000
    assert "round 2 of 2: block-0 " in "\n".join(said)
    assert "nan" not in "\n".join(said)


def test_what_cannot_be_is_refused() -> None:
    for minutes in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="--minutes must be above 0"):
            DemoSettings(minutes=minutes)
    with pytest.raises(InputError, match="no text at nowhere"):
        DemoSettings(data=Path("nowhere"))
