"""The ways of generating text, by name."""

from __future__ import annotations

from serving.conditions import Conditions
from serving.drafters import Drafters
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
    drafters: Drafters,
    guide: Guide,
    conditions: Conditions,
    spellings: Spellings = NO_TOKENS,
) -> dict[str, Mode]:
    """Every mode over a ring and the router's own models; `auto` chooses by `guide` and `conditions`."""
    fixed: list[Mode] = [
        SweepMode(ring, spellings),
        ChunkedMode(ring, spellings),
        ResampleMode(ring, drafters, spellings),
        VerifiedMode(ring, drafters, spellings),
        InfillMode(ring, drafters, spellings),
        ArMode(ring, spellings),
        SpeculativeMode(ring, drafters, spellings),
        LocalMode(drafters.local, spellings),
    ]
    modes = {mode.name: mode for mode in fixed}
    return modes | {AutoMode.name: AutoMode(ring, modes, guide, conditions)}
