"""Memory of a plan, against sums made by hand."""

from __future__ import annotations

import pytest

from trainer.planning.inventory import PartInventory
from trainer.planning.memory import WorkerMemory, coordinator_memory, outer_tensors, worker_memory
from trainer.planning.traffic import traffic_of
from trainer.rounds.settings import RoundSettings

P = 4 * 1000
PART = PartInventory("block-0", {"a": (10, 100)}, 3 * P + 500, {"block-1": {"b": (200,)}}, 3)


def worker(**changes: object) -> WorkerMemory:
    settings = RoundSettings(**{"rounds": 2, "codec": "fp32", "down_codec": "fp32", **changes})  # type: ignore[arg-type]
    return worker_memory(PART, traffic_of(PART, settings), settings)


def test_a_worker_of_whole_numbers_that_waits() -> None:
    memory = worker()
    assert (memory.weights, memory.gradients, memory.optimizer) == (P, P, P + 500)
    assert memory.copies == 2 * 800, "as fetched, and in the module that reads"
    assert (memory.rounds, memory.encoding) == (P, 4 * P), "its base; update, weights, and the payload twice"
    assert memory.total == P + (P + 500) + 1600 + P + 4 * P


def test_gradients_and_activations_go_before_an_update_is_made() -> None:
    memory = WorkerMemory(100, 100, 200, 0, 100, 400, activations=5000)
    assert memory.total == 100 + 200 + 100 + 5100


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"codec": "int8"}, 2),
        ({"overlap": "naive"}, 2),
        ({"overlap": "eager"}, 4),
        ({"overlap": "eager", "codec": "e3m0"}, 5),
    ],
)
def test_what_stays_between_rounds(changes: dict[str, str], times: int) -> None:
    """The base; error feedback; the last update; eager's own base and momentum."""
    assert worker(**changes).rounds == times * P


@pytest.mark.parametrize(("outer", "tensors"), [("mean", 0), ("nesterov", 1), ("delayed", 1), ("radial", 1)])
def test_an_outer_optimizer_is_asked_what_it_keeps(outer: str, tensors: int) -> None:
    assert outer_tensors(RoundSettings(outer=outer)) == tensors  # type: ignore[arg-type]


def test_a_coordinator_by_hand() -> None:
    settings = RoundSettings(rounds=2, replicas=3, outer="nesterov", codec="fp32", down_codec="fp32")
    traffic = [traffic_of(PART, settings)] * 2
    # weights and momentum, two whole files, of both parts; three updates, their payload, and a merge's own tensors
    assert coordinator_memory([PART] * 2, traffic, settings) == 2 * (2 * P + 2 * P) + (3 + 1 + 3) * P
    lossy = RoundSettings(rounds=2, replicas=3, outer="nesterov", codec="fp32", down_codec="int8")
    traffic = [traffic_of(PART, lossy)] * 2
    differences = 2 * 4 * (1000 + 40)
    assert coordinator_memory([PART] * 2, traffic, lossy) == 2 * 5 * P + differences + 7 * P
