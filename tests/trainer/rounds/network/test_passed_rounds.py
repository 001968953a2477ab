"""Rounds for which an update was refused: nobody waits for another that will not come."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.rounds.transfer import pieces
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]


def submit(network: Any, submission: Any, payload: bytes) -> Any:
    requests = [rounds_pb2.SubmitRequest(submission=submission)]
    requests += [rounds_pb2.SubmitRequest(piece=piece) for piece in pieces(payload)]
    return list(network.stub.Submit(iter(requests), timeout=30))[-1].verdict


def test_a_round_does_not_wait_for_who_has_passed_it(network: Start, until: Callable[..., Any]) -> None:
    """What was refused is not made again: without its worker a lockstep round would never end."""
    net = network()
    one, two = net.join("one", part=0), net.join("two", part=0)
    good = net.payload("block-0")
    assert submit(net, net.submission(one, good, worker="one"), good).outcome == rounds_pb2.OUTCOME_ACCEPTED
    bad = np.full(len(good) // 4, math.nan, np.float32).tobytes()
    assert submit(net, net.submission(two, bad, worker="two"), bad).outcome == rounds_pb2.OUTCOME_REFUSED
    net.stub.Next(rounds_pb2.NextRequest(worker="two", lease=two.lease, after=0), timeout=30)
    until(lambda: net.ledger.round("block-0") == 1, 30)


def test_a_round_that_all_have_passed_is_given_out_again(network: Start) -> None:
    """Nothing else would ever come for it."""
    net = network(replicas=1)
    place, good = net.join(part=0), net.payload("block-0")
    bad = np.full(len(good) // 4, math.nan, np.float32).tobytes()
    assert submit(net, net.submission(place, bad), bad).outcome == rounds_pb2.OUTCOME_REFUSED
    again = net.stub.Next(
        rounds_pb2.NextRequest(worker="hand", lease=place.lease, after=0, wait_seconds=30), timeout=60
    )
    assert again.order.round == 0
    assert submit(net, net.submission(place, good), good).outcome == rounds_pb2.OUTCOME_ACCEPTED
