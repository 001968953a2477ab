"""How a new version reaches the workers: whole, or as a rounded difference from what they have."""

from __future__ import annotations

from trainer.rounds.codec import codec_named
from trainer.rounds.settings import CodecName
from trainer.rounds.tensors import Tensors, add, shapes, subtract


def publish(weights: Tensors, public: Tensors, codec: CodecName) -> tuple[Tensors, bytes]:
    """What the workers have next, and the difference that brings them there; (weights, b"") for `fp32`.

    The difference is taken from what they have, not from the weights before, so that what one version rounds away is
    in the next: error feedback without a state of its own.
    """
    if codec == "fp32":
        return weights, b""
    difference = codec_named(codec).encode(subtract(weights, public))
    return receive(public, difference, codec), difference


def receive(public: Tensors, difference: bytes, codec: CodecName) -> Tensors:
    """The worker's side: the next public weights. Raises CodecError for another size."""
    return add(public, codec_named(codec).decode(difference, shapes(public)))
