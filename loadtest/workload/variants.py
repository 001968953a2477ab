"""A variant that is measured: a mode with its settings, such as `sweep`, `ar-speculative:int8` or
`resample:ar:chunk=32:candidates=64`.

Help reads this file: nothing heavy here.
"""

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from loadtest.commands import check_names
from serving.drawing import DRAWING_MODES
from serving.drawing.request import DrawingRequest
from serving.modes import MODES, SCORERS
from serving.router.request import Request
from stages.errors import InputError, one_of

# Settings whose value is enough: no two have a value in common.
WORDS = dict.fromkeys(SCORERS, "scorer") | dict.fromkeys(("fp32", "int8", "int4"), "codec")
# The others, and their kind. Their ranges are the router's to check: it alone knows the model.
KEYS: dict[str, type] = {
    "chunk": int,
    "candidates": int,
    "steps": int,
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "sampler": str,
    "draft": int,
    "branches": int,
    "budget_ms": int,
    "guidance": float,
    "solver": str,
}
ORDER = ("scorer", "codec", *KEYS)


@dataclass(frozen=True)
class ModeVariant:
    """Requests of one kind; settings that are not named are the router's to choose."""

    mode: str
    settings: tuple[tuple[str, Any], ...] = ()  # in the order of ORDER

    def get(self, name: str) -> Any:  # noqa: ANN401 - whatever a setting is
        return dict(self.settings).get(name)

    def having(self, **changes: Any) -> "ModeVariant":  # noqa: ANN401
        """The same with other settings; None leaves one out."""
        found = dict(self.settings) | changes
        return ModeVariant(self.mode, tuple((name, found[name]) for name in ORDER if found.get(name) is not None))

    def request(self) -> dict[str, Any]:
        """Keyword arguments of `Client.generate` or `Client.draw`, but for what is asked."""
        return {"mode": self.mode, **dict(self.settings)}

    @property
    def label(self) -> str:
        """The text that `parse_variant` reads."""
        return ":".join([self.mode, *(str(v) if n in WORDS.values() else f"{n}={v}" for n, v in self.settings)])


def parse_variant(text: str, modes: Collection[str] = (*MODES, *DRAWING_MODES)) -> ModeVariant:
    """:param modes: names that are known. Raises InputError."""
    text = text.strip()
    named = (name for name in modes if text == name or text.startswith(f"{name}:"))
    mode = max(named, key=len, default=None)  # `local:copy` is no `local` with a setting
    if mode is None:
        name = text.partition(":")[0]
        raise InputError(f"unknown mode {name!r} in --modes{one_of(name, dict.fromkeys(modes))}")
    settings: dict[str, Any] = {}
    for part in text[len(mode) + 1 :].split(":") if text != mode else ():
        name, equals, value = part.partition("=")
        if not equals:
            name, value = WORDS.get(part, ""), part
            if not name:
                raise InputError(
                    f"--modes {text!r}: {part!r} is not a setting; after the mode come, with colons between, a codec "
                    f"or a scorer ({', '.join(WORDS)}), or KEY=VALUE with the keys {', '.join(KEYS)}"
                )
        elif name not in KEYS:
            raise InputError(f"--modes {text!r}: unknown key {name!r}{one_of(name, KEYS)}")
        if name in settings:
            raise InputError(f"--modes {text!r} names {name} twice")
        settings[name] = _value(text, name, value)
    variant = ModeVariant(mode).having(**settings)
    _check_request(text, variant)
    return variant


def parse_variants(text: str, modes: Collection[str] = (*MODES, *DRAWING_MODES)) -> tuple[ModeVariant, ...]:
    """The variants of "M,M". Raises InputError."""
    variants = tuple(parse_variant(part, modes) for part in text.split(",") if part.strip())
    if not variants:
        raise InputError("--modes is empty: name one or more, such as sweep,ar")
    check_names("--modes", [variant.label for variant in variants])
    return variants


def _value(text: str, name: str, value: str) -> int | float | str:
    kind = KEYS.get(name, str)
    with contextlib.suppress(ValueError):
        found: int | float | str = kind(value)
        if not isinstance(found, float) or math.isfinite(found):
            return found
    wanted = "a whole number" if kind is int else "a number"
    raise InputError(f"--modes {text!r}: {name} must be {wanted}, not {value!r}")


def _check_request(text: str, variant: ModeVariant) -> None:
    """Raise InputError for what no request's message can carry, before a router is asked."""
    # `local` writes or draws: the bundle decides
    problems = list[str]()
    kinds = ((MODES, partial(Request, prompt=b"x")), (DRAWING_MODES, partial(DrawingRequest, classes=("0",))))
    for kind in (kind for modes, kind in kinds if variant.mode in modes):
        try:
            kind(**variant.request()).message()
            return
        except (InputError, TypeError) as error:
            problems.append(str(error))
    raise InputError(f"--modes {text!r}: {problems[0]}")
