"""Processes that hold more and more: what a soak is there to find."""

from __future__ import annotations

from collections.abc import Iterable

from loadtest.chaos.gauge import Life

MEMORY_FLOOR_KB, DESCRIPTOR_FLOOR = 100.0, 0.1
"""A minute: what is below is not worth a word."""
CLIENTS = "clients"
"""Their memory grows: they keep every account."""


def growth_of(lives: Iterable[Life]) -> list[str]:
    """A sentence for each figure whose slope is surely above 0, and above the floor."""
    words = []
    for life in lives:
        figures = (
            ("KB of memory", life.memory_slope, MEMORY_FLOOR_KB),
            ("descriptors", life.descriptor_slope, DESCRIPTOR_FLOOR),
        )
        for what, slope, floor in figures:
            if life.name != CLIENTS and slope is not None and slope.grows(floor):
                words.append(f"{life.name} grows by {slope.per_minute:.1f} ± {slope.margin:.1f} {what} a minute")
    return words
