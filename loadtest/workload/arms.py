"""An arm of a benchmark: a mode with its settings, prompts, an output length, and idle time before each request.

help reads this file: nothing heavy here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onesweep.loadtest.workload.prompts import NOVEL, Prompts
from onesweep.serving.drawing import DRAWING_MODES
from onesweep.serving.modes import MODES, SCORERS
from onesweep.stages.errors import InputError, one_of

SPECULATIVE = "ar-speculative"
SCORED = ("resample",)
# Of the modes that can name one.
DRAFTERS = {SPECULATIVE: ("hosts", "model", "lookup", "both")} | dict.fromkeys(SCORED, ("model",))
CHUNKED = ("chunked", "resample")  # modes that can say how much a sweep writes
CANDIDATES = ("resample",)  # modes that can say how many candidates a sweep has
MAX_COUNT = 1 << 16  # of a chunk, or of candidates
BYTES, TOKENS, LEVELS = "bytes", "tokens", "levels"
LENGTH_FLAGS = {BYTES: "--bytes", TOKENS: "--max-tokens", LEVELS: "--levels"}


@dataclass(frozen=True)
class ModeChoice:
    """A mode as it is named on the command line: `ar:int8`, `chunked:4`, `resample:12x64+ar`, `steps:int8`.

    `local` writes or draws: the bundle decides.
    """

    mode: str
    codec: str | None = None
    drafter: str | None = None
    scorer: str | None = None
    chunk: int | None = None  # symbols a sweep
    candidates: int | None = None

    @property
    def label(self) -> str:
        chunk = f"{self.chunk or ''}x{self.candidates}" if self.candidates else self.chunk
        settings = [str(setting) for setting in (chunk, self.drafter, self.scorer, self.codec) if setting]
        return f"{self.mode}:{'+'.join(settings)}" if settings else self.mode

    def settings(self) -> dict[str, Any]:
        """Settings of a request; those left out are the router's to choose."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Length:
    """Most bytes or tokens of an output, for a text may end before; of pictures their levels."""

    count: int
    unit: str = BYTES  # a token is a byte where the model reads bytes

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"

    @property
    def draws(self) -> bool:
        """True for pictures."""
        return self.unit == LEVELS

    @property
    def flag(self) -> str:
        """The flag that named it."""
        return LENGTH_FLAGS[self.unit]


@dataclass(frozen=True)
class Arm:
    """One row of the table: requests that differ in nothing but their prompt and seed."""

    choice: ModeChoice
    length: Length
    idle_s: float = 0.0  # seconds without a request before each of these, so that TCP's congestion windows fall back
    prompts: Prompts = NOVEL
    temperature: float | None = None  # none: the router's to choose

    def call(self, number: int, seed: int) -> dict[str, Any]:
        """Arguments of one `Client.generate` or `Client.draw`: the request with this number."""
        if self.length.draws:
            call: dict[str, Any] = {"classes": self.prompts.text(number), "levels": self.length.count, "seed": seed}
            return call | self.choice.settings()
        call = {"prompt": self.prompts.text(number), f"max_{self.length.unit}": self.length.count, "seed": seed}
        if self.temperature is not None:
            call["temperature"] = self.temperature
        return call | self.choice.settings()


def parse_choice(text: str) -> ModeChoice:
    """The mode and settings of "MODE" or "MODE:SETTING+SETTING". Raises InputError."""
    mode, colon, rest = text.strip().partition(":")
    if mode not in MODES and mode not in DRAWING_MODES:
        raise InputError(f"unknown mode {mode!r} in --modes{one_of(mode, dict.fromkeys((*MODES, *DRAWING_MODES)))}")
    codec: str | None = None
    drafter: str | None = None
    scorer: str | None = None
    sizes: tuple[int | None, int | None] | None = None
    codecs, drafters = _codecs_of(mode), DRAFTERS.get(mode, ())
    for setting in rest.split("+") if colon else ():
        if setting in codecs and codec is None:
            codec = setting
        elif setting in drafters and drafter is None:
            drafter = setting
        elif mode in SCORED and setting in SCORERS and scorer is None:
            scorer = setting
        elif sizes is None and (read := _sizes(setting, mode)):
            sizes = read
        else:
            known = [f"one codec ({', '.join(codecs)})"] if codecs else []
            known += [f"one drafter ({', '.join(drafters)})"] if drafters else []
            known += [f"one scorer ({', '.join(SCORERS)})"] if mode in SCORED else []
            of_what = ", or that and of how many candidates (CxM, xM)" if mode in CANDIDATES else ""
            known += [f"how much a sweep writes (1 or more){of_what}"] if mode in CHUNKED else []
            settings = ", joined by +, ".join(known) or "nothing"
            raise InputError(f"--modes {text!r}: {setting!r} is not a setting; after the colon comes {settings}")
    return ModeChoice(mode, codec, drafter, scorer, *(sizes or ()))


def _sizes(text: str, mode: str) -> tuple[int | None, int | None] | None:
    """Chunk and candidates of "C", "CxM" or "xM"; None where `mode` has no such setting."""
    match = re.fullmatch(r"([0-9]{1,6})?(?:x([0-9]{1,6}))?", text)
    if mode not in CHUNKED or match is None:
        return None
    chunk, candidates = (int(each) if each else None for each in match.groups())
    known = [count for count in (chunk, candidates) if count is not None]
    fits = known and all(1 <= count <= MAX_COUNT for count in known)
    return (chunk, candidates) if fits and (candidates is None or mode in CANDIDATES) else None


def _codecs_of(mode: str) -> tuple[str, ...]:
    """The codecs that a request of this mode can name."""
    from onesweep.stages.model.codec import CODECS, HIDDEN  # imports torch

    if mode == "local":
        return ()
    return tuple(HIDDEN) if mode in ("ar", "steps", SPECULATIVE, *SCORED) else tuple(CODECS)


def parse_choices(text: str) -> tuple[ModeChoice, ...]:
    """The modes of "M,M". Raises InputError."""
    choices = tuple(parse_choice(part) for part in text.split(",") if part.strip())
    if not choices:
        raise InputError("--modes is empty: name one or more, such as sweep,ar")
    _check_different([choice.label for choice in choices], "--modes")
    return choices


def parse_lengths(text: str, unit: str = BYTES) -> tuple[Length, ...]:
    """The output lengths, or levels, of "N,N". Raises InputError."""
    option = LENGTH_FLAGS[unit]
    try:
        lengths = tuple(Length(int(part), unit) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r} must be numbers such as 32,256") from None
    _check_different([str(length.count) for length in lengths], option)
    return lengths


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
