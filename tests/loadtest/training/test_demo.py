"""A training over links, and the serving of what it made."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.training.demo import DemoSettings, train_and_serve
from stages.errors import InputError

RUN = """
steps = 4
sequences = 2
[architecture]
parts = 1
layers = 1
width = 32
heads = 2
context_bytes = 64
[rounds]
steps_per_round = 2
replicas = 1
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_trained_is_served(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    said: list[str] = []
    settings = DemoSettings(config=tmp_path / "run.toml", profile="loopback", max_bytes=16)
    made = train_and_serve(settings, said.append)
    assert made.rounds == 2
    assert made.sweeps == 1
    assert 4.0 < made.next_byte_nats < 6.0
    assert made.moved_bytes > 10_000
    assert "round 2 of 2: block-0 " in "\n".join(said)


def test_what_cannot_be_is_refused() -> None:
    for minutes in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="--minutes must be above 0"):
            DemoSettings(minutes=minutes)
    with pytest.raises(InputError, match="no text at nowhere"):
        DemoSettings(data=Path("nowhere"))
