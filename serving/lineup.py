"""One prompt through several modes: what `compare` and `demo` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from serving.client import Client, Result
from serving.errors import RequestRefused
from stages.errors import InputError, OnesweepError

SCORERS = ("chain", "ar")
SCORED = ("resample", "verified", "infill")
"""Modes that are run with each scorer."""
INFILL, AUTO = "infill", "auto"


@dataclass(frozen=True)
class Entrant:
    """A mode, and the scorer that it is to use where it uses one."""

    mode: str
    scorer: str | None = None
    named: bool = True
    """Whether the user named it: what nobody named, and has no weights, is left out without a word."""

    @property
    def label(self) -> str:
        return f"{self.mode}:{self.scorer}" if self.scorer else self.mode


def named_entrants(text: str) -> list[Entrant]:
    """The entrants of "M,M:SCORER". Raises InputError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError("--modes is empty: name one or more, such as sweep,ar")
    entrants = []
    for part in parts:
        mode, colon, scorer = part.partition(":")
        if colon and scorer not in SCORERS:
            raise InputError(f"unknown scorer {scorer!r} in {part!r}; choose from {', '.join(SCORERS)}")
        entrants.append(Entrant(mode, scorer or None))
    return list(dict.fromkeys(entrants))


def all_entrants(modes: Sequence[str], scorer: str | None, suffix: str) -> list[Entrant]:
    """Every mode that is served, with each scorer where it uses one; `infill` where there is a suffix.

    :param scorer: the user's choice, or None.
    """
    return [
        Entrant(mode, chosen, named=False)
        for mode in modes
        if suffix or mode != INFILL
        for chosen in (SCORERS if mode in SCORED and scorer is None else (None,))
    ]


def run_entrants(
    client: Client, prompt: str, entrants: Sequence[Entrant], settings: dict[str, Any]
) -> dict[str, Result | str]:
    """Each one's Result, or the sentence that says why there is none. The first error of an only one is raised."""
    outcomes: dict[str, Result | str] = {}
    for entrant in entrants:
        try:
            outcomes[entrant.label] = client.generate(prompt, **entrant_settings(entrant, settings))
        except OnesweepError as error:
            lacks_weights = isinstance(error, RequestRefused) and error.code is grpc.StatusCode.FAILED_PRECONDITION
            if entrant.scorer and lacks_weights and not entrant.named:
                continue
            if len(entrants) == 1:
                raise
            outcomes[entrant.label] = str(error)
    return outcomes


def entrant_settings(entrant: Entrant, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without those that other modes refuse."""
    own = {**settings, "mode": entrant.mode}
    if entrant.scorer:
        own["scorer"] = entrant.scorer
    if entrant.mode != INFILL:
        own["suffix"] = ""
    if entrant.mode != AUTO:
        own["budget_ms"] = None
    return own
