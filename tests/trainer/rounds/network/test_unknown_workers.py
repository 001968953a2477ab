"""Unknown workers: one of them cannot harm the others or the coordinator."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from stages.wire.tls import Security, Tls
from tests.conftest import PATIENCE_S, refused, until
from tests.trainer.rounds.network.calls import Start, submit
from tests.trainer.small import rounds_config
from trainer.rounds.commands import is_open_to_others
from trainer.rounds.merging import MAX_STRIKES
from trainer.rounds.settings import CoordinatorSettings
from trainer.rounds.store import audit
from trainer.v1 import rounds_pb2

ACCEPTED, DUPLICATE, REFUSED = rounds_pb2.OUTCOME_ACCEPTED, rounds_pb2.OUTCOME_DUPLICATE, rounds_pb2.OUTCOME_REFUSED


def hand_in(net: Any, worker: str, size: float = 0.01) -> Any:
    """Join, hand in, and leave."""
    place, payload = net.join(worker, part=0), net.payload("block-0", net.delta("block-0", size))
    verdict = submit(net, net.submission(place, payload, worker), payload)
    net.stub.Leave(rounds_pb2.LeaveRequest(worker=worker, lease=place.lease), timeout=PATIENCE_S)
    return verdict


def test_a_place_submits_one_update_a_round_under_any_name(network: Start) -> None:
    net = network()
    net.join("honest", part=0)
    assert hand_in(net, "key.1").outcome == ACCEPTED
    reason = "this place has already submitted round 0 of block-0"
    second = hand_in(net, "key.2", 0.02)
    assert (second.outcome, second.reason) == (REFUSED, reason)
    net.end()
    net = network()  # after a restart it knows
    third = hand_in(net, "key.3", 0.03)
    assert (third.outcome, third.reason) == (REFUSED, reason)
    assert hand_in(net, "honest", 0.015).outcome == ACCEPTED
    assert audit(net.out / "rounds").accepted == 2


@pytest.mark.slow
def test_a_harmful_worker_is_named_and_expelled(network: Start) -> None:
    config = replace(rounds_config, architecture=replace(rounds_config.architecture, parts=1))
    changes: dict[str, Any] = {"robust": "scored", "rounds": MAX_STRIKES + 2, "steps_per_round": 4}
    net = network(config, **changes)
    place = net.join("eve")
    with ThreadPoolExecutor(1) as pool:
        honest = pool.submit(net.work, "honest")
        for number in range(MAX_STRIKES):
            until(lambda number=number: net.ledger.round("block-0") == number)
            drawn = torch.Generator().manual_seed(number)
            noise = {k: 0.4 * torch.randn(shape, generator=drawn) for k, shape in net.shapes("block-0").items()}
            payload = net.payload("block-0", noise)
            lie = net.submission(place, payload, "eve", id=f"lie-{number}", round=number, base_version=number)
            assert submit(net, lie, payload).outcome == ACCEPTED
        assert honest.result(PATIENCE_S) == MAX_STRIKES + 2, "no round waits for an expelled worker"
    until(lambda: net.ledger.round("block-0") == MAX_STRIKES + 2)
    liar = next(member for member in net.coordinator.members if member.worker == "eve")
    assert f"version {MAX_STRIKES} of block-0: it changes the loss on held-out text by +" in liar.problem
    net.end()
    net = network(config, **changes)  # after a restart it knows
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "eve is expelled from this run:"):
        net.join("eve")
    net.join("honest")
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):  # its place has its record
        net.join("eve-2")
    found = audit(net.out / "rounds")
    assert (found.problems, found.left_out, found.merged) == ([], MAX_STRIKES, MAX_STRIKES + 2)


def test_scoring_needs_held_out_text(tmp_path: Path, onesweep: Callable[..., Any]) -> None:
    (tmp_path / "run.toml").write_text('[rounds]\nrobust = "scored"\n')
    found = onesweep("train", "coordinate", "--config", tmp_path / "run.toml", "--listen", "127.0.0.1:0", "--own-data")
    assert found.code == 2
    assert "give --data with text like theirs" in found.message


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        (CoordinatorSettings("127.0.0.1:0"), False),
        (CoordinatorSettings("127.0.0.1:0", tokens=Path("tokens.toml")), True),
        (CoordinatorSettings("0.0.0.0:0", security=Security(Tls(Path("ca.pem")))), True),
        (CoordinatorSettings("0.0.0.0:0", security=Security(insecure=True)), True),
    ],
)
def test_updates_are_scored_if_other_machines_may_join(settings: CoordinatorSettings, scored: bool) -> None:
    assert is_open_to_others(settings) is scored


def test_the_last_update_resent_after_a_restart_is_a_duplicate(network: Start) -> None:
    net = network(replicas=1, rounds=1)
    assert hand_in(net, "hand").outcome == ACCEPTED
    until(lambda: net.ledger.round("block-0") == 1)
    net.end()
    net = network(replicas=1, rounds=1)
    place, payload = net.join(part=0), net.payload("block-0")
    assert submit(net, net.submission(place, payload), payload).reason == "block-0 has finished its last round"
    merged = next(r["id"] for r in net.ledger.store.records() if r["kind"] == "accepted")
    assert submit(net, net.submission(place, payload, id=merged), payload).outcome == DUPLICATE
