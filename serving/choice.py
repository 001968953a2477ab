"""What `auto` picks: the best text that can be had in time, from forecasts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.conditions import Forecast


@dataclass(frozen=True)
class Choice:
    """What was picked, and from what."""

    picked: Forecast
    fitting: int
    """Options that fit the budget."""
    options: int
    better: Forecast | None
    """The cheapest option of better text, which does not fit; None where there is none."""
    budget_ms: float | None

    @property
    def reason(self) -> str:
        """A sentence for the user; the picked option's label comes first, so that it can be asked for by name."""
        f, which = self.picked, f"{self.options} settings"
        if self.budget_ms is not None:
            which = f"the {self.fitting} of {self.options} settings that fit {self.budget_ms:.0f} ms"
        what = f"{f.option.label} with {f.option.bits:.3f} judge bits a byte has the best text of {which}"
        trips = f"{f.sweeps:.0f} sweep{'s' * (round(f.sweeps) != 1)} of {f.trip_ms:.0f} ms and " if f.sweeps else ""
        what += f"; {f.high_ms:.0f} ms expected now: {trips}{f.compute_ms:.0f} ms of arithmetic"
        if self.better is not None:
            other = self.better
            what += f"; {other.option.label} ({other.option.bits:.3f} bits) would take {other.high_ms:.0f} ms"
        return what


def choose(forecasts: Sequence[Forecast], budget_ms: float | None) -> Choice | None:
    """The option of best text among those that fit the budget, the quicker one of two equals; None where none fits.

    :param budget_ms: None = no matter how long it takes.
    """
    fitting = [f for f in forecasts if budget_ms is None or f.high_ms <= budget_ms]
    if not fitting:
        return None
    picked = min(fitting, key=lambda f: (f.option.bits, f.high_ms))
    better = [f for f in forecasts if f.option.bits < picked.option.bits]
    nearest = min(better, key=lambda f: f.high_ms, default=None)
    return Choice(picked, len(fitting), len(forecasts), nearest, budget_ms)
