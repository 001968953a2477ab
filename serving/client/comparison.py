"""One prompt through several modes: what `compare` and `demo` run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.client.result import Result
from serving.modes import COPY, MODES, SCORERS
from stages.errors import InputError, OnesweepError, one_of, printable
from stages.progress import aligned, ticking

if TYPE_CHECKING:
    from serving.client.client import Client
    from serving.v1 import router_pb2

# Modes that are run with each scorer.
SCORED = ("resample",)
AUTO = "auto"


@dataclass(frozen=True)
class Entrant:
    """A mode, and the scorer that it is to use where it uses one."""

    mode: str
    scorer: str | None = None

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
        mode, colon, scorer = (part, "", "") if part in MODES else part.partition(":")
        if colon and scorer not in SCORERS:
            raise InputError(f"unknown scorer {scorer!r} in {part!r}{one_of(scorer, SCORERS)}")
        entrants.append(Entrant(mode, scorer or None))
    return list(dict.fromkeys(entrants))


def all_entrants(status: router_pb2.StatusResponse, scorer: str | None) -> list[Entrant]:
    """Every mode that is served, with each served scorer where it uses one.

    :param scorer: the user's choice, or None.
    """
    scorers = [name for name in SCORERS if getattr(status, f"{name}_digest")]
    return [
        Entrant(mode, chosen)
        for mode in status.modes
        for chosen in (scorers if mode in SCORED and scorer is None else (None,))
    ]


@ticking("writing, one mode after the other")
def run_entrants(
    client: Client, prompt: str, entrants: Sequence[Entrant], settings: dict[str, Any]
) -> dict[str, Result | str]:
    """Each one's Result, or the sentence that says why there is none. The first error of an only one is raised."""
    outcomes: dict[str, Result | str] = {}
    for entrant in entrants:
        try:
            outcomes[entrant.label] = client.generate(prompt, **entrant_settings(entrant, settings))
        except OnesweepError as error:
            if len(entrants) == 1:
                raise
            outcomes[entrant.label] = str(error)
    return outcomes


def entrant_settings(entrant: Entrant, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without those that other modes refuse."""
    own = {**settings, "mode": entrant.mode}
    if entrant.scorer:
        own["scorer"] = entrant.scorer
    if entrant.mode != AUTO:
        own["budget_ms"] = None
    return own


# Results side by side, for a terminal.

TEXT_WIDTH = 100

_COLUMNS = ("mode", "latency", "first byte", "tokens/s", "sweeps", "hops", "wire bytes", "compute", "host-seconds")


def comparison(prompt: str, outcomes: dict[str, Result | str]) -> str:
    """A table of what each mode cost, and its text; a mode that failed has its error in place of figures."""
    told = [_row(mode, each) if isinstance(each, Result) else (mode, each) for mode, each in outcomes.items()]
    lines = aligned([_COLUMNS, *told], ruled=True)
    if COPY in outcomes:
        lines += ["", f"How near {COPY} is to the model: onesweep bench quality --modes ar,{COPY}"]
    for mode, outcome in outcomes.items():
        if isinstance(outcome, Result):
            shown = f"{printable(prompt)}|{printable(outcome.text)}"
            wrapped = "\n".join(textwrap.wrap(shown, TEXT_WIDTH, drop_whitespace=False))
            lines += ["", f"{mode}:", textwrap.indent(wrapped, "  ")]
    return "\n".join(lines)


def _row(mode: str, result: Result) -> tuple[str, ...]:
    return (
        # and the mode that ran, where that is another
        mode if mode in (result.mode, f"{result.mode}:{result.scorer}") else f"{mode}: {result.mode}",
        f"{result.latency_ms:.0f} ms",
        f"{result.first_byte_ms:.0f} ms",
        f"{1000 * result.output_tokens / result.latency_ms:.1f}",
        str(result.sweeps),
        str(result.hops),
        f"{result.wire_bytes_total:,}",
        f"{result.compute_ms:.0f} ms",
        f"{result.host_seconds:.3f}",
    )
