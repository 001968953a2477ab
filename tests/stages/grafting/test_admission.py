"""Hops of a grafted chain: fields are checked before anything is made of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onesweep.stages.backends.sweep import FEATURES
from onesweep.stages.checkpoint.manifest import Manifest
from onesweep.stages.grafting.block import GraftArchitecture, SlotShape
from onesweep.stages.host.parts import HostPlan, ModelSource
from onesweep.stages.host.validation import parse_hop
from onesweep.stages.model.llama import LlamaArchitecture
from onesweep.stages.model.partition import equal_probability
from onesweep.stages.model.scoring import MAX_LOGITS
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.status import StatusError

WIDTH, CODE_DIM, SLOTS = 16, 4, 6
ALPHABET = Alphabet(1 << 17)
Change = Callable[[stage_pb2.Sweep], object]


def plan(block: int) -> HostPlan:
    base = LlamaArchitecture((1, 1), WIDTH, 2, 1, 8, 24, 400, ALPHABET.size)
    architecture = GraftArchitecture(base, SlotShape(CODE_DIM, 4, 2))
    manifest = Manifest("chain", architecture, (None, None), partition=equal_probability(2, 0.1, 3.0))
    return HostPlan((block,), 2, chain=ModelSource(Path("nowhere"), manifest, "d" * 64))


def hop(block: int) -> stage_pb2.Hop:
    request = stage_pb2.Hop(router="r", session="s", capacity=40, digest="d" * 64)
    request.left_s = 60
    clean = ALPHABET.encode([7, 1 << 16, 9])
    request.sweep.CopyFrom(stage_pb2.Sweep(block=block, clean=clean, slots=SLOTS, steps=1, codec="int8"))
    request.sweep.sampling.temperature = 0.8
    if block:
        request.sweep.estimate = bytes(SLOTS * (CODE_DIM + 4))
        request.sweep.features = FEATURES.encode(torch.zeros(3, WIDTH))
        request.sweep.slot_features = FEATURES.encode(torch.zeros(SLOTS, WIDTH))
    return request


@pytest.mark.parametrize("block", [0, 1])
def test_a_good_hop_is_taken(block: int) -> None:
    assert parse_hop(hop(block), plan(block)).kind == "chain"


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        (0, lambda s: setattr(s, "clean", s.clean[:-1]), "not whole symbols"),
        (0, lambda s: setattr(s, "clean", (1 << 17).to_bytes(4, "little")), "symbol 131072 does not exist"),
        (0, lambda s: (setattr(s, "clean", b""), setattr(s, "start", 3)), "at least one known symbol"),
        (0, lambda s: setattr(s, "slots", MAX_LOGITS // ALPHABET.size + 1), "there are at most 128"),
        (0, lambda s: setattr(s, "slot_features", b"x"), "no features of theirs"),
        (1, lambda s: setattr(s, "slot_features", b""), "bytes"),
        (1, lambda s: setattr(s, "slot_features", s.slot_features[:-1]), "bytes"),
        (1, lambda s: setattr(s, "features", s.features + s.slot_features), "bytes"),
    ],
)
def test_a_bad_one_is_refused_with_a_sentence(block: int, change: Change, message: str) -> None:
    request = hop(block)
    change(request.sweep)
    with pytest.raises(StatusError, match=message):
        parse_hop(request, plan(block))


def test_a_message_has_room_for_the_features_of_a_full_context() -> None:
    positions = 400
    assert plan(1).message_bytes() > FEATURES.size(positions, WIDTH) + positions * (4 * CODE_DIM)
