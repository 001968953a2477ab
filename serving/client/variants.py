"""Variants of a request: a mode with its settings, such as `sweep`, `ar-speculative:int8` or
`resample:ar:chunk=32:candidates=64`, to compare, race and measure.

`--help` loads this file, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from serving.client.result import Result
from serving.modes import COPY, DRAWING_MODES, MODES, SCORERS
from serving.router.request import CODECS, SETTINGS, SHAPES, Request, kind_of
from stages.errors import InputError, OnesweepError, close_to, one_of, printable, quoted
from stages.progress import aligned, ticking

if TYPE_CHECKING:
    from serving.client.client import Client
    from serving.v1 import router_pb2

# Settings identified by their value alone: no two share a value.
WORDS = dict.fromkeys(SCORERS, "scorer") | dict.fromkeys(CODECS, "codec")
# The other settings, of texts and of pictures, with their types. The router checks ranges that depend on the model.
KEYS: dict[str, type] = {f.name: kind_of(f) for f in SETTINGS if f.name not in ("mode", "seed", *WORDS.values())}
KEYS |= {"guidance": float, "solver": str}
ORDER = ("scorer", "codec", *KEYS)


@dataclass(frozen=True)
class ModeVariant:
    """Requests of one kind; the router chooses settings that it does not name."""

    mode: str
    settings: tuple[tuple[str, Any], ...] = ()  # in the order of ORDER

    def get(self, name: str) -> Any:  # noqa: ANN401 - whatever a setting is
        return dict(self.settings).get(name)

    def having(self, **changes: Any) -> ModeVariant:  # noqa: ANN401
        """A copy with changed settings; None drops one."""
        found = dict(self.settings) | changes
        return ModeVariant(self.mode, tuple((name, found[name]) for name in ORDER if found.get(name) is not None))

    def request(self) -> dict[str, Any]:
        """Keyword arguments of `Client.generate` or `Client.draw`, except the prompt or classes."""
        return {"mode": self.mode, **dict(self.settings)}

    @property
    def label(self) -> str:
        """The text that `parse_variant` reads."""
        return ":".join([self.mode, *(str(v) if n in WORDS.values() else f"{n}={v}" for n, v in self.settings)])


def parse_variant(text: str, modes: Collection[str] = (*MODES, *DRAWING_MODES), option: str = "--modes") -> ModeVariant:
    """:param modes: known names. :param option: the option with the variants, for errors. Raises InputError."""
    text = text.strip()
    named = (name for name in modes if text == name or text.startswith(f"{name}:"))
    mode = max(named, key=len, default=None)  # `local:copy` is a mode, not `local` with a setting
    if mode is None:
        name = text.partition(":")[0]
        raise InputError(f"unknown mode {quoted(name)} in {option}{one_of(name, dict.fromkeys(modes))}")
    settings, where = dict[str, Any](), f"{option} {quoted(text)}"
    for part in text[len(mode) + 1 :].split(":") if text != mode else ():
        name, equals, value = part.partition("=")
        if not equals:
            name, value = WORDS.get(part, ""), part
            if not name:
                raise InputError(
                    f"{where}: {quoted(part)} is not a setting{close_to(part, WORDS)}; after the mode, separated by "
                    f"colons, give a codec or a scorer ({', '.join(WORDS)}), or KEY=VALUE with the keys "
                    f"{', '.join(KEYS)}"
                )
        elif name not in ORDER:
            raise InputError(f"{where}: unknown key {quoted(name)}{one_of(name, KEYS)}")
        if name in settings:
            raise InputError(f"{where} names {name} twice")
        settings[name] = _value(where, name, value)
    variant = ModeVariant(mode).having(**settings)
    _check_request(where, variant)
    return variant


def parse_variants(
    text: str, modes: Collection[str] = (*MODES, *DRAWING_MODES), option: str = "--modes"
) -> tuple[ModeVariant, ...]:
    """Parse variants as in "M,M". Raises InputError."""
    variants = tuple(parse_variant(part, modes, option) for part in text.split(",") if part.strip())
    if not variants:
        raise InputError(f"{option} is empty: name one or more, such as sweep,ar")
    if doubled := next((each for each in variants if variants.count(each) > 1), None):
        raise InputError(f"{option} names {doubled.label!r} twice")
    return variants


def _value(where: str, name: str, value: str) -> int | float | str:
    kind = KEYS.get(name, str)
    if not value:
        raise InputError(f"{where}: {name} has no value: give {name}=VALUE")
    with contextlib.suppress(ValueError):
        found: int | float | str = kind(value)
        if not isinstance(found, float) or math.isfinite(found):
            return found
    expected = "a whole number" if kind is int else "a number"
    raise InputError(f"{where}: {name} must be {expected}, not {quoted(value)}")


def _check_request(where: str, variant: ModeVariant) -> None:
    """Raise InputError for settings that no message can carry, before anything is sent."""
    from serving.drawing.request import DrawingRequest  # imports grpc, which `--help` must not wait for

    # `local` writes or draws: the bundle decides
    problems = list[str]()
    kinds = ((MODES, partial(Request, prompt=b"x")), (DRAWING_MODES, partial(DrawingRequest, classes=("0",))))
    for kind in (kind for modes, kind in kinds if variant.mode in modes):
        try:
            kind(**variant.request()).message()
            return
        except (InputError, TypeError) as error:
            problems.append(str(error))
    raise InputError(f"{where}: {problems[0]}")


# One prompt through several modes: what `compare` and `demo` run.


def all_variants(status: router_pb2.StatusResponse, scorer: str | None) -> list[ModeVariant]:
    """Every served mode, with each served scorer if it uses one.

    :param scorer: the user's choice, or None.
    """
    scorers = [name for name in SCORERS if getattr(status, f"{name}_digest")]
    return [
        ModeVariant(mode).having(scorer=chosen)
        for mode in status.modes
        for chosen in (scorers if mode == "resample" and scorer is None else (None,))
    ]


@ticking("writing, one mode after the other")
def run_variants(
    client: Client, prompt: str, variants: Sequence[ModeVariant], settings: dict[str, Any]
) -> dict[str, Result | str]:
    """Run each variant; returns its Result or a sentence on why it failed. With a single variant, raises its error."""
    outcomes: dict[str, Result | str] = {}
    for variant in variants:
        try:
            outcomes[variant.label] = client.generate(prompt, **variant_settings(variant, settings))
        except OnesweepError as error:
            if len(variants) == 1:
                raise
            outcomes[variant.label] = str(error)
    return outcomes


def variant_settings(variant: ModeVariant, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without those that only other modes accept, overridden by the variant's own."""
    others = {f.name for f in SETTINGS if variant.mode not in f.metadata.get("modes", MODES) and f.name not in SHAPES}
    return {**{name: value for name, value in settings.items() if name not in others}, **variant.request()}


# A comparison of results, for a terminal.

TEXT_WIDTH = 100

_COLUMNS = ("mode", "latency", "first byte", "tokens/s", "sweeps", "hops", "wire bytes", "compute", "host-seconds")


def comparison(prompt: str, outcomes: dict[str, Result | str]) -> str:
    """A table of each mode's cost and text; a failed mode shows its error instead of numbers."""
    rows = [_row(mode, each) if isinstance(each, Result) else (mode, each) for mode, each in outcomes.items()]
    lines = aligned([_COLUMNS, *rows], ruled=True)
    if COPY in outcomes:
        lines += ["", f"To measure how close {COPY} is to the model: onesweep bench quality --modes ar,{COPY}"]
    for mode, outcome in outcomes.items():
        if isinstance(outcome, Result):
            shown = f"{printable(prompt)}|{printable(outcome.text)}"
            wrapped = "\n".join(textwrap.wrap(shown, TEXT_WIDTH, drop_whitespace=False))
            lines += ["", f"{mode}:", textwrap.indent(wrapped, "  ")]
    return "\n".join(lines)


def _row(mode: str, result: Result) -> tuple[str, ...]:
    return (
        # and the mode that ran, if it differs
        mode if f"{mode}:".startswith(f"{result.mode}:") else f"{mode}: {result.mode}",
        f"{result.latency_ms:.0f} ms",
        f"{result.first_byte_ms:.0f} ms",
        f"{1000 * result.output_tokens / result.latency_ms:.1f}",
        str(result.sweeps),
        str(result.hops),
        f"{result.wire_bytes_total:,}",
        f"{result.compute_ms:.0f} ms",
        f"{result.host_seconds:.3f}",
    )
