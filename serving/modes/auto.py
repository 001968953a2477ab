"""`auto`: the best text that can be had within a latency budget, on the links as they are now.

It runs one of the other modes with settings from a frontier (serving/frontier.py), and watches the clock: what no
longer fits the budget is finished by an option that does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from serving.accounting import Account
from serving.choice import Choice, choose
from serving.conditions import Conditions, Forecast, Spent
from serving.frontier import WRITTEN_BY, Frontier, Option
from serving.modes.base import CHOOSABLE, Generation, Mode
from serving.view import RingView
from serving.watch import Watch
from stages.refusal import Refusal, failed_precondition, invalid
from stages.sessions import KINDS

GRACE = 1.05
"""Share of its budget at which a request that is late gives up waiting."""
ABSENT = f"the router has no frontier to choose from: write one with {WRITTEN_BY!r}, and start the router with it"


@dataclass(frozen=True)
class Guide:
    """The frontier that a router chooses from."""

    frontier: Frontier | None = None
    problem: str = ABSENT
    """Why there is none; meaningless where there is one."""
    local_digest: str = ""
    """Of the router's own model."""


class AutoMode(Mode):
    """Chooses among the other modes."""

    name = "auto"
    uses_hosts = False  # not always, and with a budget it does not wait for those that are lost
    chooses = CHOOSABLE
    codecs = ("",)
    default_codec = ""
    keeps_budget = True

    def __init__(self, ring: RingView, modes: Mapping[str, Mode], guide: Guide, conditions: Conditions) -> None:
        """:param modes: those that can be chosen."""
        self.ring, self.modes, self.guide, self.conditions = ring, modes, guide, conditions

    @property
    def problem(self) -> str:
        if self.guide.frontier is None:
            return self.guide.problem
        digests = {kind: self.ring.digest(kind) for kind in KINDS} | {"local": self.guide.local_digest}
        if problem := self.guide.frontier.problem(digests):
            return problem
        return "" if self._served else "none of the frontier's modes has its weights here"

    @property
    def positions(self) -> int:
        return max((self.modes[name].positions for name in self._served), default=0)

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        if request.budget_ms is None:
            await self.ring.usable(self.ring.settings.hop_timeout_s)
        choice = self._choose(request)
        account.reason = choice.reason + (f"; hosts are left out: {self.ring.problem}" if self.ring.problem else "")
        run, rest = choice.picked, request
        while rest.max_symbols:
            _book(account, run.option)
            before = Spent.of(account)
            async with aclosing(self._while_in_time(run.option, rest, account)) as pieces:
                async for piece in pieces:
                    rest = replace(rest, prompt=rest.prompt + piece, max_symbols=rest.max_symbols - len(piece))
                    yield piece
            self.conditions.learn_option(run.option, Spent.of(account).since(before))
            if rest.max_symbols:
                run = self._hurry(request, rest, account)

    async def _while_in_time(self, option: Option, rest: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """What `option` writes, for as long as the quickest other way could still finish the text in time."""
        other = None if rest.budget_ms is None else min(self._others(rest, account), key=lambda f: f.ms, default=None)
        watch = None if other is None else Watch(self.conditions, option, other.option, rest.max_symbols)
        left = rest.max_symbols
        async with aclosing(self.modes[option.mode].generate(self._part(option, rest), account)) as pieces:
            while left:
                spare_ms = watch.spare_ms(self._left_ms(rest, account)) if watch else None
                if spare_ms == 0:
                    return
                try:
                    async with asyncio.timeout(None if spare_ms is None else spare_ms / 1000):
                        piece = await anext(pieces)
                except TimeoutError:
                    return
                left -= len(piece)
                if watch:
                    watch.see(len(piece))
                yield piece

    def _hurry(self, request: Generation, rest: Generation, account: Account) -> Forecast:
        """What finishes a text that is late. Raises Refusal where nothing can any more."""
        left_ms = self._left_ms(rest, account)
        others = self._others(rest, account)
        written = request.max_symbols - rest.max_symbols
        if not others:
            why = self.ring.problem or "it was given up by all that can"
            raise Refusal.numbered(
                14, f"no setting of the frontier can write what follows {written} of {request.max_symbols} bytes: {why}"
            )
        choice = choose(others, left_ms)
        quick = choice.picked if choice else min(others, key=lambda f: f.ms)
        account.reason += (
            f"; after {written} of {request.max_symbols} bytes {max(left_ms, 0):.0f} ms were left, "
            f"so {quick.option.label} wrote the rest"
        )
        return quick

    def _choose(self, request: Generation) -> Choice:
        """Raises Refusal where nothing can be had, or nothing in time."""
        forecasts = self._forecasts(request)
        if not forecasts:
            if problem := self.ring.problem:
                raise Refusal.numbered(14, f"{problem}; no setting of the frontier does without hosts")
            raise failed_precondition("no setting of the frontier can do this request: shorten it, or name a mode")
        budget_ms = request.budget_ms
        sweep_ms = self.conditions.trip_ms()
        if budget_ms is not None and not self.ring.problem and budget_ms < sweep_ms:
            raise invalid(
                f"a budget of {budget_ms} ms is below one sweep, which takes {sweep_ms:.0f} ms on the links as they "
                f"are now: give more{self._without_sweeps(forecasts, budget_ms)}"
            )
        choice = choose(forecasts, budget_ms)
        if choice is None:
            least = min(forecasts, key=lambda f: f.high_ms)
            raise invalid(
                f"a budget of {budget_ms} ms is too small for {request.max_symbols} bytes: the quickest setting, "
                f"{least.option.label}, takes {least.high_ms:.0f} ms now; give more time, or ask for fewer bytes"
            )
        return choice

    def _without_sweeps(self, forecasts: list[Forecast], budget_ms: int) -> str:
        local = min((f.ms for f in forecasts if not f.sweeps), default=None)
        if local is None:
            return ""
        fits = "" if local <= budget_ms else f", but takes {local:.0f} ms for this text"
        return f", or use mode local, which needs none{fits}"

    def _forecasts(self, request: Generation) -> list[Forecast]:
        """Of every option that can do `request`."""
        assert self.guide.frontier is not None
        options = [option for option in self.guide.frontier.options if self._can_do(option, request)]
        return [self.conditions.forecast(option, request.max_symbols) for option in options]

    def _others(self, request: Generation, account: Account) -> list[Forecast]:
        """Of every mode that this text has not been given up by."""
        return [forecast for forecast in self._forecasts(request) if forecast.option.mode not in account.modes]

    def _can_do(self, option: Option, request: Generation) -> bool:
        mode = self.modes[option.mode]
        if mode.problem or mode.spelling is not self.spelling or (mode.uses_hosts and self.ring.problem):
            return False
        if len(request.prompt) + request.max_symbols > mode.positions:
            return False
        try:
            mode.check(self._part(option, request))
        except Refusal:
            return False
        return True

    def _part(self, option: Option, request: Generation) -> Generation:
        """`request` as the option's own mode is asked for it."""
        settings = dict(option.settings)
        if request.own_temperature:
            settings["temperature"] = request.temperature
        codec = settings.pop("codec", self.modes[option.mode].default_codec)
        return replace(request, **settings, codec=codec, budget_ms=None)

    def _left_ms(self, request: Generation, account: Account) -> float:
        assert request.budget_ms is not None
        return request.budget_ms * GRACE - (time.perf_counter() - account.begin) * 1000

    @property
    def _served(self) -> list[str]:
        options = self.guide.frontier.options if self.guide.frontier else ()
        names = dict.fromkeys(option.mode for option in options)
        return [name for name in names if not self.modes[name].problem]


def _book(account: Account, option: Option) -> None:
    account.modes.append(option.mode)
    account.chunk = max(account.chunk, option.setting("chunk") or 0)
