"""What is measured: a mode with its settings, an output length, and whether the links were idle before."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.client import request_of
from stages.admission import HIDDEN
from stages.codec import CODECS
from stages.errors import InputError

DRAFTERS = ("model", "lookup", "both")
SPECULATIVE = "ar-speculative"
SCORERS = ("chain", "ar")
SCORED = ("resample", "verified")


@dataclass(frozen=True)
class ModeChoice:
    """A mode as it is named on the command line: `ar`, `ar:int8`, `ar-speculative:lookup+int8`, `resample:chain`."""

    mode: str
    codec: str | None = None
    drafter: str | None = None
    scorer: str | None = None

    @property
    def label(self) -> str:
        settings = [setting for setting in (self.drafter, self.scorer, self.codec) if setting]
        return f"{self.mode}:{'+'.join(settings)}" if settings else self.mode

    def settings(self) -> dict[str, Any]:
        """Settings of a request; those left out are the router's to choose."""
        chosen = {"mode": self.mode, "codec": self.codec, "drafter": self.drafter, "scorer": self.scorer}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class Arm:
    """One row of the table: requests that differ in nothing but their seed."""

    choice: ModeChoice
    output_bytes: int
    idle_s: float = 0.0
    """Seconds without a request before each of these, so that TCP's congestion windows fall back."""

    def call(self, prompt: str, seed: int) -> dict[str, Any]:
        """Arguments of one `Client.generate`."""
        return {"prompt": prompt, "max_bytes": self.output_bytes, "seed": seed, **self.choice.settings()}


def parse_choice(text: str, modes: Sequence[str]) -> ModeChoice:
    """The mode and settings of "MODE" or "MODE:SETTING+SETTING". Raises InputError."""
    mode, colon, rest = text.strip().partition(":")
    if mode not in modes:
        raise InputError(f"unknown mode {mode!r} in --modes; choose from {', '.join(modes)}")
    codec: str | None = None
    drafter: str | None = None
    scorer: str | None = None
    codecs = codecs_of(mode)
    for setting in rest.split("+") if colon else ():
        if setting in codecs and codec is None:
            codec = setting
        elif mode == SPECULATIVE and setting in DRAFTERS and drafter is None:
            drafter = setting
        elif mode in SCORED and setting in SCORERS and scorer is None:
            scorer = setting
        else:
            known = [f"one codec ({', '.join(codecs)})"] if codecs else []
            known += [f"one drafter ({', '.join(DRAFTERS)})"] if mode == SPECULATIVE else []
            known += [f"one scorer ({', '.join(SCORERS)})"] if mode in SCORED else []
            settings = ", joined by +, ".join(known) or "nothing"
            raise InputError(f"--modes {text!r}: {setting!r} is not a setting; after the colon comes {settings}")
    if drafter and "drafter" not in inspect.signature(request_of).parameters:
        raise InputError(f"--modes {text!r}: requests of this version cannot name a drafter")
    return ModeChoice(mode, codec, drafter, scorer)


def codecs_of(mode: str) -> tuple[str, ...]:
    """The codecs that a request of this mode can name."""
    if mode == "local":
        return ()
    return tuple(HIDDEN) if mode in ("ar", SPECULATIVE, *SCORED) else tuple(CODECS)


def parse_choices(text: str, modes: Sequence[str]) -> tuple[ModeChoice, ...]:
    """The modes of "M,M". Raises InputError."""
    choices = tuple(parse_choice(part, modes) for part in text.split(",") if part.strip())
    if not choices:
        raise InputError("--modes is empty: name one or more, such as sweep,ar")
    _check_different([choice.label for choice in choices], "--modes")
    return choices


def parse_sizes(text: str) -> tuple[int, ...]:
    """The output lengths of "N,N". Raises InputError."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--bytes {text!r} must be numbers such as 32,256") from None
    _check_different([str(size) for size in sizes], "--bytes")
    return sizes


def parse_names(text: str) -> tuple[str, ...]:
    """The profiles of "P,P". Raises InputError."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError("--profile is empty: name one or more")
    _check_different(names, "--profile")
    return names


def _check_different(values: Sequence[str], option: str) -> None:
    doubled = sorted({value for value in values if list(values).count(value) > 1})
    if doubled:
        raise InputError(f"{option} names {doubled[0]!r} twice")
