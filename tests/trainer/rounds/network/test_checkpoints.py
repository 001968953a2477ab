"""What a run publishes, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stages.checkpoint import load_chain
from stages.errors import CheckpointError
from stages.manifest import read_manifest
from tests.trainer.rounds.network.calls import Start, submit


def test_the_end_is_a_checkpoint_that_loads(network: Start, until: Callable[..., Any]) -> None:
    net = network(replicas=1)
    net.work_together(None, None)
    until(lambda: "chain" in read_manifest(net.out).metrics, 60)
    for block, part in zip(load_chain(net.out), net.plan.parts, strict=True):
        weights = net.ledger.weights(part)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in block.named_parameters())


def test_checkpoints_are_published_while_the_run_goes_on(network: Start, until: Callable[..., Any]) -> None:
    net = network(replicas=1, rounds=2, coordinator={"publish_every": 1})
    place, payload = net.join(part=0), net.payload("block-0")
    submit(net, net.submission(place, payload), payload)
    other = net.join("other", part=1)
    payload = net.payload("block-1")
    submit(net, net.submission(other, payload, worker="other"), payload)
    until(lambda: net.coordinator.publisher.published == {"block-0": 1, "block-1": 1}, 30)
    assert not net.coordinator.ended
    weights = net.ledger.weights("block-0")
    block, _ = load_chain(net.out)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in block.named_parameters())


def test_weights_that_are_confidently_wrong_are_not_published(network: Start) -> None:
    net = network(replicas=1)
    publisher, weights = net.coordinator.publisher, {part: net.ledger.weights(part) for part in net.plan.parts}
    publisher.publish({part: (0, tensors) for part, tensors in weights.items()}, last=False)
    before = read_manifest(net.out)
    newer = {name: 1.01 * tensor for name, tensor in weights["block-0"].items()}
    wrong = {name: 100 * tensor for name, tensor in weights["block-1"].items()}
    wrong["clean_head.bias"] = torch.arange(256.0)
    with pytest.raises(CheckpointError, match=r"block-1 is not published: .* the checkpoint stays as it was"):
        publisher.publish({"block-0": (1, newer), "block-1": (1, wrong)}, last=False)
    assert read_manifest(net.out) == before
