"""The ways of generating text, by name."""

from __future__ import annotations

from serving.conditions import Conditions
from serving.local import LocalModel
from serving.modes.ar import ArMode
from serving.modes.auto import AutoMode, Guide
from serving.modes.base import Generation, Mode
from serving.modes.chunked import ChunkedMode, SweepMode
from serving.modes.infill import InfillMode
from serving.modes.local import LocalMode
from serving.modes.resample import ResampleMode
from serving.modes.speculative import SpeculativeMode
from serving.modes.verified import VerifiedMode
from serving.spellings import NO_TOKENS, Spellings
from serving.view import RingView

__all__ = ["MODES", "Generation", "Mode", "all_modes"]

MODES = ("sweep", "chunked", "resample", "verified", "infill", "ar", "ar-speculative", "local", "auto")


def all_modes(
    ring: RingView,
    local: LocalModel | None,
    guide: Guide,
    conditions: Conditions,
    spellings: Spellings = NO_TOKENS,
) -> dict[str, Mode]:
    """Every mode over a ring and, if the router has one, a local model; `auto` chooses by `guide` and `conditions`."""
    fixed: list[Mode] = [
        SweepMode(ring),
        ChunkedMode(ring),
        ResampleMode(ring, local),
        VerifiedMode(ring, local),
        InfillMode(ring, local),
        ArMode(ring, spellings),
        SpeculativeMode(ring, local, spellings),
        LocalMode(local),
    ]
    modes = {mode.name: mode for mode in fixed}
    return modes | {AutoMode.name: AutoMode(ring, modes, guide, conditions)}
