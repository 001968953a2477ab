"""Rounds over real gRPC: the same weights as in one process, and every kind of run to its end."""

from typing import Any

import pytest
import torch

from stages.checkpoint.checkpoint import load_chain
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from tests.conftest import until
from tests.trainer.rounds.network.calls import Start
from tests.trainer.small import corpus, rounds_config
from trainer.rounds.codecs import CODECS


@pytest.mark.parametrize(
    "rounds",
    [
        {},
        {"codec": "int8", "down_codec": "int8"},
        {"codec": "top32", "down_codec": "top7"},
        {"outer_rate": 0.7, "outer_momentum": 0.9},
    ],
    ids=["plain", "int8 both ways", "sparse both ways", "nesterov"],
)
def test_four_workers_make_the_weights_of_one_process(network: Start, rounds: dict[str, Any]) -> None:
    net = network(**rounds)
    assert net.work_together(None, None, None, None) == [3, 3, 3, 3]
    net.check_weights()
    assert [net.ledger.round(part) for part in net.spec.parts] == [3, 3]
    net.check_audit(12)
    codecs = [CODECS[net.spec.config.rounds.up_codec(round_)] for round_ in range(3)]
    one_replica = sum(codec.size(like) for codec in codecs for like in net.spec.shapes.values())
    assert net.coordinator.received_bytes == 2 * one_replica


@pytest.mark.parametrize(
    "rounds",
    [
        {"model": "scorer", "context_by": "copies", "down_codec": "e3m0"},
        {"model": "ar"},
    ],
)
def test_every_kind_of_run_finishes(network: Start, rounds: dict[str, Any]) -> None:
    net = network(rounds_config, **{"replicas": 1, "rounds": 2, **rounds})
    trained = net.work_together(*[None] * len(net.spec.parts))
    assert trained == [2] * len(net.spec.parts)
    until(lambda: net.coordinator.schedule.ended)
    net.check_audit(2 * len(net.spec.parts))


# Published checkpoints.


def test_a_finished_run_publishes_a_checkpoint_that_loads(network: Start) -> None:
    net = network(replicas=1)
    net.work_together(None, None)
    until(lambda: "chain" in read_manifest(net.out).metrics)
    for block, part in zip(load_chain(net.out), net.spec.parts, strict=True):
        weights = net.ledger.weights(part)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in block.named_parameters())


def test_weights_with_a_worse_loss_are_not_published(network: Start) -> None:
    net = network(replicas=1)
    publisher, weights = net.coordinator.publisher, {part: net.ledger.weights(part) for part in net.spec.parts}
    its_letters = torch.zeros(256).index_fill(0, corpus.valid.long(), 100.0)  # others have no chance, as in Cyrillic
    weights["block-0"] = weights["block-0"] | {"clean_head.bias": its_letters}
    publisher.publish({part: (0, tensors) for part, tensors in weights.items()}, last=False)
    before = read_manifest(net.out)
    newer = {name: 1.01 * tensor for name, tensor in weights["block-0"].items()}
    wrong = {name: 100 * tensor for name, tensor in weights["block-1"].items()}
    wrong["clean_head.bias"] = torch.arange(256.0)
    with pytest.raises(CheckpointError, match=r"block-1 is not published: .* the checkpoint is unchanged"):
        publisher.publish({"block-0": (1, newer), "block-1": (1, wrong)}, last=False)
    assert read_manifest(net.out) == before
