"""What is measured: a mode with its settings, `NAME[:SCORER][:KEY=VALUE...]`, such as `resample:chain:chunk=32`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from serving.client import request_of
from serving.frontier import SETTINGS
from stages.errors import InputError

SCORERS = ("chain", "ar")
INFILL = "infill"


@dataclass(frozen=True)
class QualityArm:
    """One row of the table: requests that differ in nothing but prompt and seed. None is the router's to choose."""

    mode: str
    scorer: str | None = None
    chunk: int | None = None
    candidates: int | None = None
    steps: int | None = None
    temperature: float | None = None
    codec: str | None = None
    sampler: str | None = None
    drafter: str | None = None
    draft: int | None = None
    branches: int | None = None
    budget_ms: int | None = None

    @property
    def label(self) -> str:
        """A spec that gives this arm."""
        settings = (f"{name}={getattr(self, name)}" for name in KEYS if getattr(self, name) is not None)
        return ":".join([self.mode, *([self.scorer] if self.scorer else []), *settings])

    def request(self) -> dict[str, Any]:
        """Keyword arguments of `Client.generate` besides prompt, suffix, length and seed."""
        return {name: value for name, value in asdict(self).items() if value is not None}


KEYS: dict[str, type] = {name: kind for name, kind in SETTINGS.items() if name != "scorer"} | {"budget_ms": int}
"""Settings that a spec can name, and their kind. Their ranges are the router's to check: it alone knows the model."""


def parse_arm(spec: str, modes: Sequence[str]) -> QualityArm:
    """:param modes: names that are known. Raises InputError."""
    mode, *parts = (part.strip() for part in spec.split(":"))
    if mode not in modes:
        raise InputError(f"unknown mode {mode!r} in {spec!r}; choose from {', '.join(modes)}")
    scorer: str | None = None
    settings: dict[str, int | float | str] = {}
    for i, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals:
            if i or part not in SCORERS:
                raise InputError(
                    f"{spec!r}: {part!r} is not a setting; after the mode comes a scorer ({', '.join(SCORERS)}), "
                    f"then KEY=VALUE with the keys {', '.join(KEYS)}"
                )
            scorer = part
            continue
        if name not in KEYS:
            raise InputError(f"{spec!r}: unknown key {name!r}; choose from {', '.join(KEYS)}")
        if name in settings:
            raise InputError(f"{spec!r} names {name} twice")
        settings[name] = _value(spec, name, value)
    arm = QualityArm(mode, scorer, **settings)  # type: ignore[arg-type] # KEYS has the kinds of the fields
    _check_request(spec, arm)
    return arm


def parse_arms(text: str, modes: Sequence[str]) -> tuple[QualityArm, ...]:
    """The arms of "M,M". Raises InputError."""
    arms = tuple(parse_arm(part, modes) for part in text.split(",") if part.strip())
    if not arms:
        raise InputError("--modes is empty: name one or more, such as sweep,ar")
    return distinct(arms)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The temperatures of "T,T". Raises InputError."""
    try:
        return tuple(dict.fromkeys(_finite(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--temperatures {text!r} must be numbers such as 0.7,0.8,1") from None


def at_temperatures(arms: Sequence[QualityArm], temperatures: Sequence[float]) -> tuple[QualityArm, ...]:
    """Each arm at each temperature; one that names its own keeps it."""
    if not temperatures:
        return tuple(arms)
    return distinct(
        [
            replace(arm, temperature=temperature)
            for arm in arms
            for temperature in (temperatures if arm.temperature is None else [arm.temperature])
        ]
    )


def distinct(arms: Sequence[QualityArm]) -> tuple[QualityArm, ...]:
    """`arms`. Raises InputError when one is there twice."""
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"{label!r} is named twice")
    return tuple(arms)


def _value(spec: str, name: str, text: str) -> int | float | str:
    try:
        return _finite(text) if KEYS[name] is float else KEYS[name](text)
    except ValueError:
        wanted = "a whole number" if KEYS[name] is int else "a number"
        raise InputError(f"{spec!r}: {name} must be {wanted}, not {text!r}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _check_request(spec: str, arm: QualityArm) -> None:
    """Raise InputError for what a request's message cannot carry, before a router is asked."""
    try:
        request_of(b"x", **arm.request())
    except InputError as error:
        raise InputError(f"{spec!r}: {error}") from None
