"""Error feedback: what a codec rounds away goes into the next update of the same worker (arXiv 1901.09847)."""

from __future__ import annotations

from trainer.rounds.codec.base import Codec
from trainer.rounds.tensors import Tensors, add, shapes, subtract


class ErrorFeedback:
    """One for each part (or fragment) that a worker hands in. `carried` is part of its state."""

    def __init__(self, codec: Codec, carried: Tensors | None = None) -> None:
        self.codec, self.carried = codec, carried or {}

    def encode(self, delta: Tensors) -> bytes:
        """The payload of this update and all that was rounded away before."""
        wanted = add(delta, self.carried) if self.carried else delta
        payload = self.codec.encode(wanted)
        if self.codec.name != "fp32":
            self.carried = subtract(wanted, self.codec.decode(payload, shapes(delta)))
        return payload
