"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

LEVELS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int) -> str:
    """At most `width` bars from the least to the greatest value; with more values than bars, each stands for a mean."""
    count = min(len(values), width)
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(LEVELS[round((mean - low) / span * (len(LEVELS) - 1)) if span else 0] for mean in means)
