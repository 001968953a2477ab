"""The ways of generating text, by name."""

from __future__ import annotations

from serving.local import LocalModel
from serving.modes.ar import ArMode
from serving.modes.base import Generation, Mode
from serving.modes.chunked import ChunkedMode, SweepMode
from serving.modes.local import LocalMode
from serving.modes.speculative import SpeculativeMode
from serving.ring import Ring

__all__ = ["MODES", "Generation", "Mode", "all_modes"]

MODES = ("sweep", "chunked", "ar", "ar-speculative", "local")


def all_modes(ring: Ring, local: LocalModel | None) -> dict[str, Mode]:
    """Every mode over a ring and, if the router has one, a local model."""
    modes: list[Mode] = [
        SweepMode(ring),
        ChunkedMode(ring),
        ArMode(ring),
        SpeculativeMode(ring, local),
        LocalMode(local),
    ]
    return {mode.name: mode for mode in modes}
