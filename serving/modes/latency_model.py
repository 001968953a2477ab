"""Links and machines as they are now, and how long an option takes on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from serving.modes.frontier import Option
from serving.router.accounting import Account

# Weight of what was measured, at each further request: links change.
FORGET = 0.8
LEARN = 0.3
# Of a link that was not measured (keep-warm messages are off).
UNKNOWN_RTT_MS = 100.0
# What a trip takes besides the links' delay, before one was seen.
HANDLING_MS = 4.0
UNIT_BYTES = 100_000
# What a unit of payload takes on 100 Mbit/s, before any was seen to travel.
UNIT_MS = 8.0
# How many requests the two are worth.
PRIOR, UNIT_PRIOR = 0.1, 0.2


class TripOverhead:
    """Time of trips besides the delay of the links: `fixed` and `unit` for each UNIT_BYTES of payload.

    Least squares over the requests so far, later ones weighing more, towards the values that are assumed before any.
    """

    def __init__(self) -> None:
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def learn(self, extra_ms: float, payload: float) -> None:
        x = payload / UNIT_BYTES
        for name, value in (("_n", 1.0), ("_x", x), ("_xx", x * x), ("_y", extra_ms), ("_xy", x * extra_ms)):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def ms(self, payload: float) -> float:
        n, xx = self._n + PRIOR, self._xx + UNIT_PRIOR
        y, xy = self._y + PRIOR * HANDLING_MS, self._xy + UNIT_PRIOR * UNIT_MS
        unit = max((n * xy - self._x * y) / (n * xx - self._x**2), 0.0)
        return max((y - unit * self._x) / n + unit * payload / UNIT_BYTES, 0.0)


class CostRatio:
    """Running mean of measured arithmetic over the frontier's, which may be of other machines."""

    def __init__(self) -> None:
        self.value = 1.0

    def learn(self, took: float, expected: float) -> None:
        if expected > 0:
            self.value += LEARN * (took / expected - self.value)


@dataclass(frozen=True)
class Forecast:
    """Expected cost of an option now."""

    option: Option
    # Expected.
    ms: float
    # With as many sweeps as most texts need.
    high_ms: float
    sweeps: float
    # Of one sweep, without arithmetic; 0 where there is none.
    trip_ms: float
    compute_ms: float


class LatencyModel:
    """Running estimates for one ring, fed by the links' round trips and by every request's account."""

    def __init__(self, rtts: Callable[[], Sequence[float | None]]) -> None:
        """:param rtts: last round trips of the router to each host in ring order, milliseconds; None = not known."""
        self.rtts = rtts
        self._extra = {"sweep": TripOverhead(), "step": TripOverhead()}
        self._hosts, self._router = CostRatio(), CostRatio()
        # Milliseconds and symbols of each mode's texts, running means.
        self._texts: dict[str, tuple[float, float]] = {}

    def trip_ms(self, payload: float = 0.0) -> float:
        """One sweep from the router round the hosts and back, without arithmetic.

        :param payload: bytes of all its hops.
        """
        return self._delays()[0] + self._extra["sweep"].ms(payload)

    def step_ms(self, payload: float = 0.0) -> float:
        """One further symbol of `ar`, which goes from the last host to the first."""
        return self._delays()[1] + self._extra["step"].ms(payload)

    def forecast(self, option: Option, count: int) -> Forecast:
        """`option` for a text of `count` symbols."""
        mean, high = option.sweeps_for(count)
        share = count / option.output_symbols
        host_ms = option.host_ms * share * self._hosts.value
        router_ms = option.router_ms * share * self._router.value
        compute_ms, payload = host_ms + router_ms, option.wire_bytes * share / max(mean, 1.0)
        if not mean:
            return Forecast(option, compute_ms, compute_ms, 0, 0.0, compute_ms)
        trips_ms = mean * self.trip_ms(payload)
        if option.mode == "ar":
            trips_ms = self.trip_ms(payload) + (mean - 1) * self.step_ms(payload)
        expected_ms = trips_ms + compute_ms
        return Forecast(option, expected_ms, expected_ms * (high / mean), mean, trips_ms / mean, compute_ms)

    def text_ms(self, mode: str, count: int) -> float | None:
        """A text of `count` symbols, as that mode's texts took so far; None before the first of them.

        A shorter text is not promised to be quicker: a sweep is a sweep.
        """
        took = self._texts.get(mode)
        return took[0] * max(count / took[1], 1.0) if took else None

    def learn(self, mode: str, account: Account, latency_ms: float) -> None:
        """Book the trips of a request."""
        mode = account.mode or mode
        if account.output_tokens:
            ms, symbols = self._texts.get(mode, (latency_ms, float(account.output_tokens)))
            self._texts[mode] = (
                ms + LEARN * (latency_ms - ms),
                symbols + LEARN * (account.output_tokens - symbols),
            )
        if not (sweeps := account.sweeps):
            return
        # hosts that compute batches of candidates side by side take less time than their sum
        rest_ms = max(latency_ms - account.local_compute_ms - sum(account.compute_ms.values()), 0.0)
        payload = account.wire_bytes_total / sweeps
        sweep_ms, step_ms = self._delays()
        if mode != "ar":
            self._extra["sweep"].learn(rest_ms / sweeps - sweep_ms, payload)
        elif sweeps > 1:
            self._extra["step"].learn((rest_ms - self.trip_ms(payload)) / (sweeps - 1) - step_ms, payload)

    def learn_option(self, option: Option, account: Account) -> None:
        """Book the arithmetic of a text that `option` wrote."""
        share = account.output_tokens / option.output_symbols
        self._hosts.learn(sum(account.compute_ms.values()), option.host_ms * share)
        self._router.learn(account.local_compute_ms, option.router_ms * share)

    def _delays(self) -> tuple[float, float]:
        """Delay of one sweep, and of one step of `ar`, from the router's own links.

        Two hosts are taken to be as far apart as the farther of them is from the router; what that is wrong by is
        learned with the first requests.
        """
        rtts = [UNKNOWN_RTT_MS if rtt is None else rtt for rtt in self.rtts()]
        within_ms = sum(max(pair) for pair in pairwise(rtts)) / 2
        back_ms = max(rtts[0], rtts[-1]) / 2 if len(rtts) > 1 else 0.0
        return within_ms + (rtts[0] + rtts[-1]) / 2, within_ms + back_ms
