"""The modes that generate text, one file each, and those that draw.

This file imports nothing heavy, because the command line and clients load it."""

from collections.abc import Mapping
from typing import Literal

# By name: the sweeps for N bytes, and a description.
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
NO_COPY = "the router has no copy of the hosts' model: `onesweep import` adds one to a model that it imports"
AUTO = "auto"
# Modes that need no hosts, for text and for pictures.
WITHOUT_HOSTS = ("local", COPY)
# Modes that sample token by token and so accept sampling settings; given those, `auto` chooses among these modes.
SHAPED = ("ar", "ar-speculative", "local", COPY, AUTO)
# Modes whose every token is sampled by the hosts: they can report logprobs and follow a schema.
LOGPROB_MODES = ("ar", "ar-speculative", AUTO)
# The mode that can report a prompt's logprobs.
SCORING = "ar"
# The hosts' models that can score given tokens, by their names in requests. The first one served is the default.
SCORERS: Mapping[str, Literal["scorer", "ar"]] = {"scorer": "scorer", "ar": "ar"}

# By name: the trips for K noise levels along H hosts, and a description.
DRAWING_MODES: Mapping[str, tuple[str, str]] = {
    "chain": ("1", "each host takes the pictures through its own range of noise"),
    "steps": ("K + 1", "an undivided net, cut by layers: every step of the solver goes round the ring"),
    "local": ("0", "a net of one block's size, for all noise, on the router's machine"),
}
DEFAULT_LEVELS = 12
# Doubles the compute and halves the distance to real pictures (docs/research/pictures.md).
DEFAULT_GUIDANCE = 2.0
MAX_PICTURES = 1024
PICTURES_SERVED = "this checkpoint only draws: use `onesweep draw`, or POST /v1/images/generations"


def metric_mode(mode: str) -> str:
    """Name of a drawing mode in logs and metrics, in which plain `local` is the text mode."""
    return f"draw-{mode}"
