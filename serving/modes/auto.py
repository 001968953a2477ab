"""`auto`: the best text that the served weights allow, within the latency budget if the request has one.

With a frontier (serving/modes/frontier.py) it runs another mode with settings from there: without a budget, the one
with the fewest trips whose text the judge finds no worse than the model's own; with a budget, the best that fits, as
forecast from the links when the request starts. Without a frontier it runs the first served mode of PREFERENCE.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from serving.modes import AUTO, LOGPROB_MODES, SHAPED
from serving.modes.base import Generation, Mode
from serving.modes.frontier import WRITTEN_BY, Forecast, Frontier, LatencyModel, Option
from serving.modes.resample import ResampleMode
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer
from serving.router.accounting import Account
from serving.router.ring import RingView
from stages.host.plan import MODEL_KINDS
from stages.wire.status import StatusError, failed_precondition, invalid, unavailable

# Without a frontier: the first of these that the weights and the request allow. If the drafter is near the model
# (`ResampleMode.is_near`), `resample` improves on its text in one sweep. Otherwise the model's own exact text comes
# first, which `ar-speculative` generates in fewer sweeps than `ar`. Then come the modes without a pipeline, and last
# the one without hosts.
PREFERENCE = ("resample", "ar-speculative", "ar", "chunked", "sweep", "local")
RESAMPLE_SKIPPED = "resample is skipped: its drafter and its scorer were trained differently; "

# The choice of `auto` with a frontier: the best text in time, judged by forecasts alone.


class Choice(NamedTuple):
    """The chosen option, and a sentence that tells the user why. The sentence starts with the option's label, by which
    the user can request it."""

    picked: Forecast
    reason: str


def choose(forecasts: Sequence[Forecast], budget_ms: float | None) -> Choice | None:
    """The option with the best text among those that fit the budget; None if none fits.

    The target is the model's own text, that of `ar`: fewer bits mean likelier words, not better ones. Among options no
    worse than that, by the judge's interval, it takes the one with the fewest sweeps, or within a budget the quickest.

    :param budget_ms: None = no limit.
    """
    fitting = [f for f in forecasts if budget_ms is None or f.high_ms <= budget_ms]
    if not fitting:
        return None
    which = f"{len(forecasts)} settings"
    if budget_ms is not None:
        which = f"the {len(fitting)} of {which} that fit {budget_ms:.0f} ms"
    target = min((f.option for f in forecasts), key=lambda option: (option.mode != "ar", option.bits))
    as_good = [f for f in fitting if f.option.bits <= (target.bits if target.bits_high is None else target.bits_high)]
    if as_good:
        f = min(as_good, key=lambda f: (f.sweeps if budget_ms is None else 0, f.high_ms, f.option.bits))
    else:
        f = min(fitting, key=lambda f: (f.option.bits, f.high_ms))
    what = f"{f.option.label} with {f.option.bits:.3f} judge bits a byte"
    if as_good and f.option != target:
        how = "the fewest sweeps" if budget_ms is None else "the least time"
        what += f" is no worse than {target.label} ({target.bits:.3f}) to the judge, and takes {how} of {which}"
    else:
        what += f" has the best text of {which}"
    trips = f"{f.sweeps:.0f} sweep{'s' * (round(f.sweeps) != 1)} of {f.trip_ms:.0f} ms and " if f.sweeps else ""
    return Choice(f, f"{what}; {f.high_ms:.0f} ms expected now: {trips}{f.compute_ms:.0f} ms of compute")


ABSENT = f"the router has no frontier ({WRITTEN_BY!r} measures one)"


@dataclass(frozen=True)
class Guide:
    """The frontier that a router chooses from."""

    frontier: Frontier | None = None
    # Why there is none; meaningless if there is one.
    problem: str = ABSENT
    # Digest of the router's own model.
    local_digest: str = ""


class AutoMode(Mode):
    """Chooses among the other modes."""

    name = AUTO
    default_codec = ""

    def __init__(self, ring: RingView, modes: Mapping[str, Mode], guide: Guide, conditions: LatencyModel) -> None:
        """:param modes: the modes to choose from."""
        self.ring, self.modes, self.guide, self.conditions = ring, modes, guide, conditions

    @property
    def problem(self) -> str:
        if not self.unguided or self._preferred():
            return self.ring.problem if self.unguided else ""
        return "there are no weights for any mode"

    @property
    def unguided(self) -> str:
        """Why no frontier guides the choice; empty if one does."""
        if self.guide.frontier is None:
            return self.guide.problem
        digests = {kind: self.ring.digest(kind) for kind in MODEL_KINDS} | {"local": self.guide.local_digest}
        if problem := self.guide.frontier.problem(digests):
            return problem
        return "" if self._served else "none of the frontier's modes has its weights here"

    @property
    def uses_hosts(self) -> bool:  # type: ignore[override]
        """False with a frontier: within a budget, `auto` does not wait for lost hosts."""
        return bool(self.unguided)

    @property
    def tokenizer(self) -> Tokenizer:
        modes = self._choosable
        return modes[0].tokenizer if modes else BYTE_TOKENIZER

    @property
    def positions(self) -> int:
        return max((mode.positions for mode in self._choosable), default=0)

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        if problem := self.unguided:
            mode, account.reason = self._first_of(request, problem)
            own = replace(request, codec=mode.default_codec).sampled_for(mode)
        else:
            if request.budget_ms is None:
                await self.ring.usable(request.due_at, account.context.return_s)
            choice = self._choose(request, account)
            account.reason = choice.reason + (f"; hosts are left out: {self.ring.problem}" if self.ring.problem else "")
            picked = choice.picked.option
            mode, own = self.modes[picked.mode], self._part(picked, request)
        account.mode, account.sampling = mode.name, own.sampling_words
        async with aclosing(mode.generate(own, account)) as pieces:
            async for piece in pieces:
                yield piece

    def _preferred(self) -> list[Mode]:
        """The served modes of PREFERENCE, in that order."""
        served = [self.modes[name] for name in PREFERENCE if name in self.modes and not self.modes[name].problem]
        return [mode for mode in served if not isinstance(mode, ResampleMode) or mode.is_near]

    def _first_of(self, request: Generation, why: str) -> tuple[Mode, str]:
        """The mode for a request that no frontier decides (`why`), and a sentence of reasons. Raises StatusError."""
        if request.budget_ms is not None:
            raise failed_precondition(f"mode auto cannot keep a budget: {why}: leave budget_ms out, or name a mode")
        refusal: StatusError | None = None
        resample = self.modes.get(ResampleMode.name)
        is_skipped = isinstance(resample, ResampleMode) and not resample.problem and not resample.is_near
        for mode in self._preferred():
            if not self._suits(mode, request):
                continue
            try:
                mode.check(replace(request, codec=mode.default_codec))
            except StatusError as error:
                refusal = refusal or error
            else:
                reason = f"{mode.name} is the first of {', '.join(PREFERENCE)} that these weights allow"
                return mode, f"{reason}; {RESAMPLE_SKIPPED * is_skipped}{why}"
        raise refusal or failed_precondition("no served mode can do this request: name a mode to see why")

    def _choose(self, request: Generation, account: Account) -> Choice:
        """Raises StatusError if no option can do the request, or none in time."""
        assert self.guide.frontier is not None
        options = [option for option in self.guide.frontier.options if self._can_do(option, request)]
        whole, count = request.whole(self.tokenizer.vocabulary), _expected(request, account)
        forecasts = [self.conditions.forecast(o, whole if o.one_piece else count) for o in options]
        if not forecasts:
            if problem := self.ring.problem:
                raise unavailable(f"{problem}; no setting of the frontier works without hosts")
            raise failed_precondition("no setting of the frontier can do this request: shorten it, or name a mode")
        budget_ms = request.budget_ms
        sweep_ms = self.conditions.trip_ms()
        if budget_ms is not None and not self.ring.problem and budget_ms < sweep_ms:
            raise invalid(
                f"a budget of {budget_ms} ms is less than a sweep, which takes {sweep_ms:.0f} ms on the links as they "
                "are now: give more"
            )
        if choice := choose(forecasts, budget_ms):
            return choice
        fastest = min(forecasts, key=lambda f: f.high_ms)
        noun = "bytes" if request.max_tokens == request.max_bytes else self.tokenizer.noun
        raise invalid(
            f"a budget of {budget_ms} ms is too small for {request.max_tokens} {noun}: the fastest setting, "
            f"{fastest.option.label}, takes {fastest.high_ms:.0f} ms now; give more time, or ask for fewer {noun}"
        )

    def _can_do(self, option: Option, request: Generation) -> bool:
        mode = self.modes[option.mode]
        if mode.problem or (mode.uses_hosts and self.ring.problem) or not self._suits(mode, request):
            return False
        try:
            mode.check(self._part(option, request))
        except StatusError:
            return False
        return True

    def _suits(self, mode: Mode, request: Generation) -> bool:
        """True if `mode` has this mode's tokens and room for them, and accepts the kinds of settings in `request`."""
        needs_ar = request.logprobs is not None or request.json_schema
        takes = mode.name in LOGPROB_MODES or (not needs_ar and (not request.shapes or mode.name in SHAPED))
        length = mode.tokenizer.vocabulary.count(request.prompt) + request.max_tokens
        return takes and mode.tokenizer.id == self.tokenizer.id and length <= mode.positions

    def _part(self, option: Option, request: Generation) -> Generation:
        """`request` with the option's settings, for its mode."""
        settings = dict(option.settings)
        if "temperature" in request.given:
            settings["temperature"] = request.temperature
        codec = settings.pop("codec", self.modes[option.mode].default_codec)
        return replace(request, **settings, codec=codec, budget_ms=None)

    @property
    def _choosable(self) -> list[Mode]:
        """The modes to choose from; the first one's tokenizer reads prompts."""
        return self._preferred() if self.unguided else self._served

    @property
    def _served(self) -> list[Mode]:
        """The frontier's modes whose weights are served, those on hosts first."""
        options = self.guide.frontier.options if self.guide.frontier else ()
        modes = [self.modes[name] for name in dict.fromkeys(option.mode for option in options)]
        return sorted((mode for mode in modes if not mode.problem), key=lambda mode: not mode.uses_hosts)


def _expected(request: Generation, account: Account) -> int:
    """Expected output tokens: with a limit in bytes, fewer than max_tokens, by the prompt's bytes per token."""
    if request.max_bytes is None or not account.prompt_bytes:
        return request.max_tokens
    expected = math.ceil(request.max_bytes * account.prompt_tokens / account.prompt_bytes)
    return min(max(expected, 1), request.max_tokens)
