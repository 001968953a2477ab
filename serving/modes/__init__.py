"""The ways of generating text, one file a mode, and of drawing.

This file imports nothing heavy: command line and clients read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.host.plan import ModelKind

# By name: the sweeps for N bytes, and what it does.
MODES: Mapping[str, tuple[str, str]] = {
    "sweep": ("1", "the chain of blocks writes the whole text as one chunk"),
    "chunked": ("N / chunk", "the chain writes a chunk a sweep, each after all bytes before it"),
    "resample": (
        "1",
        "a drafter writes candidates of the text, one sweep scores them all, one is drawn by weight",
    ),
    "ar": ("N", "the autoregressive pipeline, a token a round"),
    "ar-speculative": ("fewer than N", "the text of `ar`, exactly; the last host drafts, several tokens a sweep"),
    "local": ("0", "the small model at the router writes alone"),
    "local:copy": ("0", "the copy of the model at the router, in fewer bits, writes alone"),
    "auto": ("", "one of these: by a frontier the best text within a budget, else the first that the weights allow"),
}
COPY = "local:copy"
NO_COPY = "the router has no copy of the hosts' model: `onesweep import` puts one beside a model that it imports"
AUTO = "auto"
# Those that need no hosts, of text and of pictures.
WITHOUT_HOSTS = ("local", COPY)
# Those that draw token by token, so that settings can shape what is drawn; `auto` then chooses among them.
SHAPED = ("ar", "ar-speculative", "local", COPY, AUTO)
# Those whose every token is one that the hosts drew: it can be told how likely it was, and be held to a schema.
TELLING = ("ar", "ar-speculative", AUTO)
# That whose hosts tell how likely the tokens of a prompt are.
SCORING = "ar"
# Models of the hosts that can score given tokens, by the name that a request has for them. The first that is served is
# the default.
SCORERS: Mapping[str, ModelKind] = {"scorer": "scorer", "ar": "ar"}

# By name: the trips for K noise levels along H hosts, and what it does.
DRAWING_MODES: Mapping[str, tuple[str, str]] = {
    "chain": ("1", "each host takes the pictures through its own range of noise"),
    "steps": ("K + 1", "an undivided net, cut by layers: every step of the solver goes round the ring"),
    "local": ("0", "a net of one block's size, for all noise, on the router's machine"),
}
DEFAULT_LEVELS = 12
# Doubles the arithmetic, and halves the distance to real pictures (docs/research/pictures.md).
DEFAULT_GUIDANCE = 2.0
MAX_PICTURES = 1024
PICTURES_SERVED = "the checkpoint draws: ask with `onesweep draw`, over HTTP at /v1/images/generations"


def metric_mode(mode: str) -> str:
    """Name of a drawing mode in logs and metrics, where `local` alone is a mode of text."""
    return f"draw-{mode}"
