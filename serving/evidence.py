"""Whether two hosts gave the same answer to the same hop, as far as honest machines do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stages.alphabet import BYTES, Alphabet
from stages.codec import CODECS, FEATURE_LIMIT, HIDDEN, StateCodec
from stages.errors import CodecError
from stages.hop import Outcome
from stages.sweep import FEATURES
from stages.v1 import stage_pb2

TOLERANCE = 1e-3
"""Largest difference of honest numbers, relative to the largest of their row where that is over one: what backends are
held to (stages/backends/agreement.py), and above what they were measured to differ by."""
STEPS = 1.01
"""And where they were rounded to integers, so many steps more: a rounding may fall either way."""


def agree(one: Outcome, other: Outcome, alphabet: Alphabet = BYTES) -> bool:
    """Whether two outcomes of one hop differ by no more than rounding. `alphabet`: that the model reads."""
    if isinstance(one, stage_pb2.Event) or isinstance(other, stage_pb2.Event):
        return isinstance(one, stage_pb2.Event) and isinstance(other, stage_pb2.Event) and same_result(one, other)
    if _but_numbers(one) != _but_numbers(other):
        return False
    if one.WhichOneof("work") == "sweep":
        mine, theirs = one.sweep, other.sweep
        estimates = _near(mine.estimate, theirs.estimate, CODECS.get(mine.codec), mine.slots)
        read = _near(mine.features, theirs.features, FEATURES, alphabet.count(mine.clean))
        return estimates and read and _near(mine.slot_features, theirs.slot_features, FEATURES, mine.slots)
    rows = alphabet.count(one.step.clean) + sum(alphabet.count(each) - 1 for each in one.step.candidates)
    return _near(one.step.hidden, other.step.hidden, HIDDEN.get(one.step.codec), rows)


def all_agree(ours: Sequence[Outcome], theirs: Sequence[Outcome], alphabet: Alphabet = BYTES) -> bool:
    """Whether two hosts made the same of the same hops, one by one."""
    return all(agree(*pair, alphabet) for pair in zip(ours, theirs, strict=True))


def same_result(one: stage_pb2.Event, other: stage_pb2.Event) -> bool:
    """Whether two sweeps ended alike: the same text, or the same numbers but for rounding."""
    kind = one.WhichOneof("outcome")
    if kind != other.WhichOneof("outcome"):
        return False
    if kind == "scores":
        return _close(_floats(one.scores.nats), _floats(other.scores.nats))
    if kind == "verdict":
        mine, theirs = one.verdict, other.verdict
        same = (mine.accepted, mine.symbols) == (theirs.accepted, theirs.symbols)
        return same and _close(_floats(mine.odds), _floats(theirs.odds))
    return one.text == other.text


def _but_numbers(hop: stage_pb2.Hop) -> stage_pb2.Hop:
    """What must be the same to the last bit: all that the next host is told, but for the computed numbers."""
    told = stage_pb2.Hop()
    told.CopyFrom(hop)
    for name in ("passages", "session"):
        told.ClearField(name)
    if told.WhichOneof("work") == "sweep":
        told.sweep.ClearField("estimate")
        told.sweep.ClearField("features")
        told.sweep.ClearField("slot_features")
    elif told.WhichOneof("work") == "step":
        told.step.ClearField("hidden")
    return told


def _near(mine: bytes, theirs: bytes, codec: StateCodec | None, rows: int) -> bool:
    if mine == theirs:  # as on machines of one kind
        return True
    if codec is None or len(mine) != len(theirs) or not rows:
        return False
    try:
        a, b = (codec.decode(each, rows, codec.dim(len(each), rows), FEATURE_LIMIT).numpy() for each in (mine, theirs))
    except CodecError:
        return False
    magnitudes = np.maximum(np.abs(a), np.abs(b))
    largest = magnitudes.max(axis=1, initial=0.0, keepdims=True)
    allowed = TOLERANCE * np.maximum(largest, 1.0) + STEPS * codec.steps(magnitudes)
    return bool((np.abs(a - b) <= allowed).all())


def _floats(payload: bytes) -> NDArray[np.float64]:
    return np.frombuffer(payload[: len(payload) // 4 * 4], dtype="<f4").astype(np.float64)


def _close(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> bool:
    return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
