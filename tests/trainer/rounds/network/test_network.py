"""Rounds over real gRPC: the same weights as in one process, and every kind of run to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.rounds.network.calls import Start
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.planning.bounds import bounds_of
from trainer.planning.inventory import take_inventory
from trainer.planning.traffic import traffic_of
from trainer.rounds.audit import audit
from trainer.rounds.fleet import Fleet
from trainer.rounds.inprocess import Engine
from trainer.rounds.store import MemoryStore


@pytest.mark.parametrize(
    "rounds",
    [
        {},
        {"codec": "int8", "down_codec": "int8"},
        {"outer": "mean", "outer_rate": 1.0},
        {"fragments": 2, "steps_per_round": 3},
        {"fragments": 2, "overlap": "naive"},
        {"overlap": "eager", "codec": "e3m0"},
        {"overlap": "patient", "fragments": 2, "down_codec": "e3m0"},
    ],
    ids=["plain", "int8 both ways", "mean", "fragments", "naive fragments", "eager", "patient fragments"],
)
def test_four_workers_make_the_weights_of_one_process(
    network: Start, corpus: Corpus, until: Callable[..., Any], rounds: dict[str, Any]
) -> None:
    net = network(**rounds)
    assert net.work_together(None, None, None, None) == [3, 3, 3, 3]
    until(lambda: net.over, 60)  # modules are drawn from one generator: nobody else may draw meanwhile
    engine = Engine(net.plan.frame, corpus, MemoryStore(), Fleet())
    engine.run()
    for part, expected in engine.published().items():
        found = net.plan.cutting.whole(part, net.ledger.weights)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert [net.ledger.round(fragment) for fragment in net.ledger.parts()] == [3] * len(net.ledger.parts())
    merged = 12 * net.plan.config.rounds.fragments
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.merged) == ([], merged, merged)
    planned = [traffic_of(part, net.plan.config.rounds) for part in take_inventory(net.plan.config)]
    assert net.coordinator.received_bytes == 2 * sum(each.up_in_all for each in planned)
    assert net.coordinator.sent_bytes == 2 * sum(each.down_in_all for each in planned)


@pytest.mark.parametrize("overlap", ["none", "naive"])
def test_rounds_that_wait_for_nobody_carry_bytes_within_their_bounds(network: Start, overlap: str) -> None:
    """A round ends with whatever comes first."""
    hasty = {"deadline": "fixed", "deadline_s": 0.001, "norm_limit": 1e6, "rounds": 6}
    net = network(fragments=2, codec="int8", down_codec="e3m0", overlap=overlap, **hasty)
    net.work_together(None, None, None, None)
    bounds = bounds_of(take_inventory(net.plan.config), net.plan.config.rounds)
    assert bounds.least <= net.coordinator.received_bytes + net.coordinator.sent_bytes <= bounds.most


@pytest.mark.parametrize(
    ("context", "rounds"),
    [
        ("chained", {}),
        ("chained", {"lookahead": True, "copies_codec": "e3m0"}),
        ("own", {"model": "scorer", "fragments": 2, "copies_codec": "int8", "copies_every": 2}),
        ("own", {"model": "ar"}),
        ("own", {"overlap": "naive"}),
        ("own", {"overlap": "eager"}),
        ("own", {"overlap": "patient", "late": "add"}),
    ],
)
def test_every_kind_of_run_comes_to_its_end(
    network: Start, rounds_config: TrainingConfig, until: Callable[..., Any], context: str, rounds: dict[str, Any]
) -> None:
    config = replace(rounds_config, architecture=replace(rounds_config.architecture, context=context))
    net = network(config, **{"replicas": 1, "rounds": 2, **rounds})
    trained = net.work_together(*[None] * len(net.plan.parts))
    assert trained == [2] * len(net.plan.parts)
    until(lambda: net.coordinator.ended, 30)
    found = audit(net.out / "rounds")
    assert found.problems == []
    assert found.merged == 2 * len(net.ledger.parts())
