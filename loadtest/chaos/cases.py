"""What is asked for while faults happen: every mode, with seeds, so that each text can be checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.load.prompts import SENTENCES

ROUNDS = 3
"""Prompts of each mode."""
SUFFIX = " and so on"
SETTINGS: dict[str, dict[str, Any]] = {
    "sweep": {"max_bytes": 96},
    "chunked": {"max_bytes": 96, "chunk": 16},
    "resample": {"max_bytes": 64, "chunk": 16, "candidates": 8},
    "verified": {"max_bytes": 64},
    "infill": {"max_bytes": 24, "chunk": 8, "candidates": 8, "suffix": SUFFIX},
    "ar": {"max_bytes": 48},
    "ar-speculative": {"max_bytes": 64},
    "local": {"max_bytes": 48},
    "auto": {"max_bytes": 48},
}
"""Of a request, by its mode. Without a budget `auto` takes the best setting, whatever the links are like."""
PROMPT_BYTES = 48
"""Most of a prompt."""
ROOM_BYTES = PROMPT_BYTES + 96 + 16


@dataclass(frozen=True)
class Case:
    """A request that has one text."""

    mode: str
    prompt: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Case:
        return cls(**record)


def make_cases(modes: Collection[str], first_seed: int, context_bytes: int) -> tuple[Case, ...]:
    """The modes take turns; every case has a seed of its own. What does not fit the context is made shorter."""
    scale = min(1.0, context_bytes / ROOM_BYTES)
    cases: list[Case] = []
    for turn in range(ROUNDS):
        for mode, settings in SETTINGS.items():
            if mode in modes:
                number = len(cases)
                prompt = SENTENCES[number % len(SENTENCES)][: int(PROMPT_BYTES * scale)]
                shorter = {**settings, "max_bytes": max(1, int(settings["max_bytes"] * scale))}
                cases.append(Case(mode, prompt, first_seed + 100 * turn + number, shorter))
    return tuple(cases)
