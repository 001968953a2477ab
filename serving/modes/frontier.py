"""The frontier: the text quality and the cost of each mode and setting, measured once and read by `auto`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from serving.client.variants import ModeVariant
from serving.modes import MODES, WITHOUT_HOSTS
from serving.modes.base import DEFAULT_TEMPERATURE
from serving.router.accounting import Account
from serving.router.request import Request
from stages.errors import InputError, file_errors, quoted, regular
from stages.settings import from_toml, limits

VERSION = 1
WRITTEN_BY = "onesweep bench quality --write FILE"
# Modes to choose from: all but `auto` itself.
CHOOSABLE = tuple(mode for mode in MODES if mode != "auto")
# Request settings that an option can fix.
SETTINGS = ("scorer", "chunk", "candidates", "steps", "temperature", "codec", "sampler", "draft", "branches")


@dataclass(frozen=True)
class Option:
    """A mode with its settings. The costs are those of a text of `output_tokens`."""

    mode: str
    settings: tuple[tuple[str, Any], ...]
    # Judge bits per byte: fewer are better.
    bits: float = field(metadata=limits(minimum=0))
    output_tokens: int = field(metadata=limits(minimum=1))
    # Mean over texts; likewise those below.
    sweeps: float = field(metadata=limits(minimum=0))
    # Enough for most texts: a high quantile.
    sweeps_high: float = field(metadata=limits(minimum=0))
    # Compute time of all hosts together.
    host_ms: float = field(metadata=limits(minimum=0))
    router_ms: float = field(metadata=limits(minimum=0))
    # Payload of all hops.
    wire_bytes: float = field(metadata=limits(minimum=0))
    bits_low: float | None = None
    bits_high: float | None = None

    @property
    def label(self) -> str:
        """The option as on a command line: `resample:ar:chunk=32`."""
        return ModeVariant(self.mode).having(**dict(self.settings)).label

    def setting(self, name: str) -> Any:  # noqa: ANN401
        return dict(self.settings).get(name)

    @property
    def one_piece(self) -> bool:
        """True if the whole text comes at once, with as many tokens as it may need."""
        return self.mode == "sweep" or (self.mode == "resample" and not self.setting("chunk"))

    def sweeps_for(self, count: int) -> tuple[float, float]:
        """Sweeps for `count` tokens: the expected number, and enough for most texts."""
        if self.mode in WITHOUT_HOSTS:
            return 0, 0
        chunk = self.setting("chunk")
        if self.one_piece:
            return 1, 1
        if self.mode == "ar":
            return count, count
        if chunk and self.mode in ("chunked", "resample"):
            return (exact := math.ceil(count / chunk)), exact
        share = count / self.output_tokens
        mean = max(self.sweeps * share, 1.0)  # no setting fixes the number
        # a sum over fewer tokens varies more relative to its length; but each sweep brings at least one token
        high = mean + (self.sweeps_high - self.sweeps) * max(share, math.sqrt(share))
        return min(mean, count), min(max(high, mean), count)

    def to_record(self) -> dict[str, Any]:
        return {**vars(self), "settings": dict(self.settings)}

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Keys that it does not know are left out. Raises InputError that says which key is wrong."""
        table = _table(record, "an option")
        mode, settings = table.get("mode"), _table(table.get("settings", {}), "settings")
        if mode not in CHOOSABLE:
            raise InputError(f"unknown mode {quoted(str(mode))}; choose from {', '.join(CHOOSABLE)}")
        if unknown := settings.keys() - {*SETTINGS}:
            raise InputError(f"{mode}: {min(unknown)} is not a setting; choose from {', '.join(SETTINGS)}")
        Request(mode=mode, **settings).message()
        return from_toml(cls, _known(cls, table) | {"settings": tuple(settings.items())}, mode)


@dataclass(frozen=True)
class Frontier:
    """Options that can be compared: one judge, one set of prompts, one set of weights."""

    options: tuple[Option, ...]
    # Digests of the weights that were measured, by the name of their folder in the bundle.
    weights: Mapping[str, str]
    judge: str
    human_bits: float | None = None

    def usual_bits(self) -> dict[str, float]:
        """Judge bits of each mode, or MODE:SCORER, at the usual temperature, from its first option in the file."""
        bits = dict[str, float]()
        for option in self.options:
            if option.setting("temperature") in (None, DEFAULT_TEMPERATURE):
                bits.setdefault(":".join(filter(None, (option.mode, option.setting("scorer")))), option.bits)
        return bits

    def problem(self, digests: Mapping[str, str]) -> str:
        """Why this frontier does not apply to the served weights; empty if it does.

        :param digests: of the served weights, by the name of their folder; empty for one not served.
        """
        for name, digest in digests.items():
            measured = self.weights.get(name, "")
            if digest and measured and digest != measured:
                return (
                    f"its frontier was measured with other weights ({name}/ {measured[:12]}, "
                    f"served: {digest[:12]}): measure these with {WRITTEN_BY!r}"
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
            raise InputError("'options' must be a list with at least one entry")
        weights = {str(name): str(digest) for name, digest in _table(table.get("weights"), "weights").items()}
        parsed = {"options": tuple(map(Option.from_record, options)), "weights": weights}
        return from_toml(cls, _known(cls, table) | parsed, "it")


def read_frontier(path: Path) -> Frontier:
    """Raises InputError that names the file, the mistake, and the command that writes a new one."""
    try:
        with file_errors(InputError, "it cannot be read"):
            return Frontier.from_record(json.loads(regular(path).read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the frontier {path} is not JSON ({error}): write it again with {WRITTEN_BY!r}") from None
    except InputError as error:
        raise InputError(f"the frontier {path}: {error}; write it again with {WRITTEN_BY!r}") from None


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _known(cls: type, table: dict[str, Any]) -> dict[str, Any]:
    """The keys that are fields of a dataclass, unless they are null."""
    return {f.name: table[f.name] for f in fields(cls) if table.get(f.name) is not None}


# The current links and machines, and the time of an option on them.

# Weight kept by old measurements at each further request, since links change.
FORGET = 0.8
# Assumed for a link without a measurement (keep-warm messages are off).
UNKNOWN_RTT_MS = 100.0
# Assumed time of a trip beyond the links' delay, before any measurement.
HANDLING_MS = 4.0
UNIT_BYTES = 100_000
# Assumed time of a unit of payload, on 100 Mbit/s, before any measurement.
UNIT_MS = 8.0
# Weight of the two assumptions, in requests.
PRIOR, UNIT_PRIOR = 0.1, 0.2


class TripOverhead:
    """Time of trips beyond the links' delay: `fixed`, plus `unit` per UNIT_BYTES of payload.

    Least squares over the requests so far, weighted towards later ones, with the assumed values as prior.
    """

    def __init__(self) -> None:
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def record(self, extra_ms: float, payload: float) -> None:
        x = payload / UNIT_BYTES
        for name, value in (("_n", 1.0), ("_x", x), ("_xx", x * x), ("_y", extra_ms), ("_xy", x * extra_ms)):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def ms(self, payload: float) -> float:
        n, xx = self._n + PRIOR, self._xx + UNIT_PRIOR
        y, xy = self._y + PRIOR * HANDLING_MS, self._xy + UNIT_PRIOR * UNIT_MS
        unit = max((n * xy - self._x * y) / (n * xx - self._x**2), 0.0)
        return max((y - unit * self._x) / n + unit * payload / UNIT_BYTES, 0.0)


@dataclass(frozen=True)
class Forecast:
    """Expected cost of an option now."""

    option: Option
    # Expected.
    ms: float
    # With enough sweeps for most texts.
    high_ms: float
    sweeps: float
    # One sweep without compute; 0 if the option has no sweeps.
    trip_ms: float
    compute_ms: float


class LatencyModel:
    """Running estimates for one ring, from the links' round trips and every request's account."""

    def __init__(self, rtts: Callable[[], Sequence[float | None]]) -> None:
        """:param rtts: last round trips from the router to each host, in ring order, milliseconds; None = unknown."""
        self.rtts = rtts
        self._extra = {"sweep": TripOverhead(), "step": TripOverhead()}

    def trip_ms(self, payload: float = 0.0) -> float:
        """Time of one sweep from the router round the hosts and back, without compute.

        :param payload: bytes over all its hops.
        """
        return self._delays()[0] + self._extra["sweep"].ms(payload)

    def step_ms(self, payload: float = 0.0) -> float:
        """Time of one further token of `ar`, which goes from the last host to the first."""
        return self._delays()[1] + self._extra["step"].ms(payload)

    def forecast(self, option: Option, count: int) -> Forecast:
        """The cost of `option` for a text of `count` tokens."""
        mean, high = option.sweeps_for(count)
        share = count / option.output_tokens
        compute_ms, payload = (option.host_ms + option.router_ms) * share, option.wire_bytes * share / max(mean, 1.0)
        if not mean:
            return Forecast(option, compute_ms, compute_ms, 0, 0.0, compute_ms)
        trips_ms = mean * self.trip_ms(payload)
        if option.mode == "ar":
            trips_ms = self.trip_ms(payload) + (mean - 1) * self.step_ms(payload)
        expected_ms = trips_ms + compute_ms
        return Forecast(option, expected_ms, expected_ms * (high / mean), mean, trips_ms / mean, compute_ms)

    def record(self, mode: str, account: Account, latency_ms: float) -> None:
        """Learn from the trips of a request."""
        mode = account.mode or mode
        if not (sweeps := account.sweeps):
            return
        # hosts that compute batches of candidates in parallel take less time than the sum
        rest_ms = max(latency_ms - account.local_compute_ms - sum(account.compute_ms.values()), 0.0)
        payload = account.wire_bytes_total / sweeps
        sweep_ms, step_ms = self._delays()
        if mode != "ar":
            self._extra["sweep"].record(rest_ms / sweeps - sweep_ms, payload)
        elif sweeps > 1:
            self._extra["step"].record((rest_ms - self.trip_ms(payload)) / (sweeps - 1) - step_ms, payload)

    def _delays(self) -> tuple[float, float]:
        """Delay of one sweep and of one step of `ar`, from the router's own links."""
        # assume that two hosts are as far apart as the farther one is from the router; the first requests correct
        # the error
        rtts = [UNKNOWN_RTT_MS if rtt is None else rtt for rtt in self.rtts()]
        within_ms = sum(max(pair) for pair in pairwise(rtts)) / 2
        back_ms = max(rtts[0], rtts[-1]) / 2 if len(rtts) > 1 else 0.0
        return within_ms + (rtts[0] + rtts[-1]) / 2, within_ms + back_ms
