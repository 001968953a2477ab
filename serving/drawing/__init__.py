"""Drawing: a request for pictures, and the ways of serving it. This file imports nothing heavy."""

from collections.abc import Mapping

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
PICTURES_SERVED = "the checkpoint draws pictures: ask for some with `onesweep draw`"


def metric_mode(mode: str) -> str:
    """Name of a drawing mode in logs and metrics, where `local` alone is a mode of text."""
    return f"draw-{mode}"
