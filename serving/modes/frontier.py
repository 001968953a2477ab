"""The frontier: what the text of each mode and setting is worth, and what it costs. Measured once, `auto` reads it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from serving.modes import MODES
from serving.modes.base import DEFAULT_TEMPERATURE
from serving.router.request import Request
from stages.errors import InputError, regular

VERSION = 1
WRITTEN_BY = "onesweep bench quality --write FILE"
# Modes that can be chosen: `auto` chooses itself.
CHOOSABLE = tuple(mode for mode in MODES if mode != "auto")
# What an option can say about a request, in the order of its label; the kinds are those of `Request`.
_KINDS: Mapping[str, type] = {"int | None": int, "float | None": float, "str | None": str}
_NAMES = ("scorer", "chunk", "candidates", "steps", "temperature", "codec", "sampler", "drafter", "draft", "branches")
SETTINGS = {name: _KINDS[Request.__annotations__[name]] for name in _NAMES}


@dataclass(frozen=True)
class Option:
    """A mode with its settings. What it costs is for a text of `output_symbols`."""

    mode: str
    settings: tuple[tuple[str, Any], ...]
    # Judge bits for a byte: fewer are better.
    bits: float
    output_symbols: int
    # Mean over texts; likewise those below.
    sweeps: float
    # As many as most texts need: a high quantile.
    sweeps_high: float
    # Arithmetic on all hosts together.
    host_ms: float
    router_ms: float
    # Payload of all hops.
    wire_bytes: float
    bits_low: float | None = None
    bits_high: float | None = None

    @property
    def label(self) -> str:
        """As on a command line: `resample:ar:chunk=32`."""
        values = {name: self.setting(name) for name in SETTINGS if self.setting(name) is not None}
        scorer = [values.pop("scorer")] if "scorer" in values else []
        return ":".join([self.mode, *scorer, *(f"{name}={value}" for name, value in values.items())])

    def setting(self, name: str) -> Any:  # noqa: ANN401
        return dict(self.settings).get(name)

    @property
    def one_piece(self) -> bool:
        """True where the whole text comes at once, as many symbols as may be needed."""
        return self.mode == "sweep" or (self.mode == "resample" and not self.setting("chunk"))

    def sweeps_for(self, count: int) -> tuple[float, float]:
        """Sweeps for `count` symbols: expected, and as many as most texts need."""
        if self.mode == "local":
            return 0, 0
        chunk = self.setting("chunk")
        if self.one_piece:
            return 1, 1
        if self.mode == "ar":
            return count, count
        if chunk and self.mode in ("chunked", "resample"):
            return (exact := math.ceil(count / chunk)), exact
        share = count / self.output_symbols
        mean = max(self.sweeps * share, 1.0)  # no setting says how many
        # a sum over fewer symbols varies more for its length; whatever the text, each sweep brings one
        high = mean + (self.sweeps_high - self.sweeps) * max(share, math.sqrt(share))
        return min(mean, count), min(max(high, mean), count)

    def to_record(self) -> dict[str, Any]:
        return {**vars(self), "settings": dict(self.settings)}

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Raises InputError that says which key is wrong."""
        table = _table(record, "an option")
        mode, settings = table.get("mode"), _table(table.get("settings", {}), "settings")
        if mode not in CHOOSABLE:
            raise InputError(f"there is no mode {mode!r}; there are {', '.join(CHOOSABLE)}")
        for name, value in settings.items():
            kind = SETTINGS.get(name)
            fits = isinstance(value, str) if kind is str else _is_number(value)
            if kind is None or not fits:
                raise InputError(f"{mode}: {name} = {value!r} is not a setting; there are {', '.join(SETTINGS)}")
        whole = tuple((name, int(v) if SETTINGS[name] is int else v) for name, v in settings.items())
        numbers = {key: _number(table, key, mode) for key in COSTS}
        count = int(numbers.pop("output_symbols"))
        if count < 1:
            raise InputError(f"{mode}: output_symbols must be at least 1, not {count}")
        ends = {key: table[key] for key in ("bits_low", "bits_high") if _is_number(table.get(key))}
        return cls(mode=mode, settings=whole, output_symbols=count, **numbers, **ends)


COSTS = ("bits", "output_symbols", "sweeps", "sweeps_high", "host_ms", "router_ms", "wire_bytes")


@dataclass(frozen=True)
class Frontier:
    """Options that can be compared: one judge, one set of prompts, one set of weights."""

    options: tuple[Option, ...]
    # Digests of the weights that were measured, by the name of their folder in the bundle.
    weights: Mapping[str, str]
    judge: str
    # What `bits` are: the name of the ruler's figure.
    basis: str
    human_bits: float | None = None

    def usual_bits(self) -> dict[str, float]:
        """Judge bits of each mode, or MODE:SCORER, at the usual temperature: of its first option in the file."""
        bits = dict[str, float]()
        for option in self.options:
            if option.setting("temperature") in (None, DEFAULT_TEMPERATURE):
                bits.setdefault(":".join(filter(None, (option.mode, option.setting("scorer")))), option.bits)
        return bits

    def problem(self, digests: Mapping[str, str]) -> str:
        """Why this frontier says nothing of the weights that are served; empty when it does.

        :param digests: of the weights that are served, by the name of their folder; empty where one is not.
        """
        for name, digest in digests.items():
            measured = self.weights.get(name, "")
            if digest and measured and digest != measured:
                return (
                    f"its frontier was measured with other weights ({name}/ {measured[:12]}, "
                    f"served are {digest[:12]}): measure these with {WRITTEN_BY!r}"
                )
        return ""

    def to_record(self) -> dict[str, Any]:
        """JSON values that `from_record` reads."""
        options = [option.to_record() for option in self.options]
        return {"frontier": VERSION, **vars(self), "weights": dict(self.weights), "options": options}

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Keys that it does not know are left out. Raises InputError that says which key is wrong."""
        table = _table(record, "a frontier")
        if table.get("frontier") != VERSION:
            raise InputError(f"'frontier' must be {VERSION}, the version of the file, not {table.get('frontier')!r}")
        options = table.get("options")
        if not isinstance(options, list) or not options:
            raise InputError("'options' must be a list with one entry or more")
        weights = _table(table.get("weights"), "weights")
        for key in ("judge", "basis"):
            if not isinstance(table.get(key), str):
                raise InputError(f"'{key}' must be text, not {table.get(key)!r}")
        human: Any = table.get("human_bits")
        return cls(
            tuple(map(Option.from_record, options)),
            {str(name): str(digest) for name, digest in weights.items()},
            table["judge"],
            table["basis"],
            float(human) if _is_number(human) else None,
        )


def read_frontier(path: Path) -> Frontier:
    """Raises InputError that names the file, what is wrong with it, and what writes another."""
    try:
        return Frontier.from_record(json.loads(regular(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read the frontier {path}: {error.strerror}; {WRITTEN_BY!r} writes one") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"the frontier {path} is not JSON ({error}): write it again with {WRITTEN_BY!r}") from None
    except InputError as error:
        raise InputError(f"the frontier {path}: {error}; write it again with {WRITTEN_BY!r}") from None


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _number(table: dict[str, Any], key: str, where: str) -> float:
    if key not in table:
        raise InputError(f"{where}: {key!r} is missing")
    if not _is_number(table[key]) or table[key] < 0:
        raise InputError(f"{where}: {key!r} must be a number from 0, not {table[key]!r}")
    return float(table[key])


def _is_number(value: object) -> bool:
    # not isfinite: a whole number can be larger than any float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
