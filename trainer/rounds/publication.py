"""How a new version reaches the workers: whole, or as a rounded difference from what they have."""

from __future__ import annotations

from collections.abc import Callable

from trainer.rounds.codec import codec_named
from trainer.rounds.settings import CodecName
from trainer.rounds.tensors import Tensors, add, shapes, subtract

WHOLE: CodecName = "fp32"
"""How a version travels to who has none before it."""


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


def route(
    held: int | None, newest: int, difference: Callable[[int], bytes | None], weights: Tensors
) -> dict[int, bytes]:
    """Differences, by number, from what is held to the newest; none where one is missing or the whole is smaller."""
    if held is None or not 0 <= newest - held <= newest:
        return {}
    found = dict[int, bytes]()
    for number in range(newest, held, -1):
        found[number] = difference(number) or b""
        if not found[number] or sum(map(len, found.values())) >= whole_size(weights):
            return {}
    return dict(sorted(found.items()))


def whole_size(weights: Tensors) -> int:
    """Bytes of a version that travels whole."""
    return codec_named(WHOLE).size(shapes(weights))
