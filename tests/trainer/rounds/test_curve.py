from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.rounds.curve import MOST_POINTS, Curves
from trainer.rounds.disk import open_store
from trainer.rounds.ledger import Ledger
from trainer.rounds.settings import RoundSettings
from trainer.rounds.update import Update

SETTINGS = RoundSettings(outer="mean", late="keep")


def test_a_restart_does_not_cut_it(tmp_path: Path, update: Callable[..., Update], tensors: Callable[..., Any]) -> None:
    def run(begin: int, end: int) -> list[tuple[Any, ...]]:
        with open_store(tmp_path) as store:
            ledger = Ledger(SETTINGS, {"p": tensors(0)}, store, "run")
            for number in range(begin, end):
                ledger.accept(update(number, 0, losses={"a_nats": 3.0 - number}), 1.0)
                if number:
                    ledger.accept(update(number - 1, 1, losses={"a_nats": 4.0 - number, "b_nats": 1.0}), 1.0)
                ledger.close("p", 2.0)
            return [(p.first, p.last, p.updates, p.late, p.losses()) for p in ledger.curves.of("p")]

    whole = [
        (0, 0, 1, 0, {"a_nats": 3.0}),
        (1, 1, 2, 1, {"a_nats": 2.5, "b_nats": 1.0}),
        (2, 2, 2, 1, {"a_nats": 1.5, "b_nats": 1.0}),
    ]
    assert run(0, 2) == whole[:2]
    assert run(2, 3) == whole


@pytest.mark.parametrize("rounds", [1, MOST_POINTS, MOST_POINTS + 1, 777])
def test_it_is_bounded_and_forgets_nothing(rounds: int) -> None:
    curves = Curves()
    for number in range(rounds):
        name = f"u{number}"
        curves.take({"kind": "accepted", "part": "p", "id": name, "round": number, "losses": {"a_nats": number}})
        curves.take({"kind": "closed", "part": "p", "round": number, "updates": [name]})
    points = curves.of("p")
    assert len(points) <= MOST_POINTS
    assert [p.first for p in points] == [0, *(p.last + 1 for p in points[:-1])]
    assert points[-1].last == rounds - 1
    assert all(p.losses() == {"a_nats": (p.first + p.last) / 2} for p in points)
    assert len({p.last - p.first for p in points[:-1]}) <= 1, "all but the last stand for as many"
