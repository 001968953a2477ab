"""One run: texts without faults, then load and faults on the same deployment, then the account."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.chaos.account import Fate, Happened, RightTexts, fate_of
from loadtest.chaos.answer import OK, Answer, Health
from loadtest.chaos.cases import Case, make_cases
from loadtest.chaos.clients import Clients, open_clients
from loadtest.chaos.crowd import Order
from loadtest.chaos.faults import FAULTS, Swap
from loadtest.chaos.gauge import Life, gauging
from loadtest.chaos.growth import CLIENTS, growth_of
from loadtest.chaos.schedule import Kind, Planned, make_schedule
from loadtest.chaos.settings import ChaosSettings
from loadtest.chaos.stand import Stand, open_stand
from stages.errors import InputError, ServiceError

WARM_UP_S = 5.0
"""Of load before the first fault."""
SOUND_S = 60.0
"""How long the next fault waits for the deployment to be whole again."""
NOTICED_S = 1.5
"""After a fault's end: what it left behind is known to the router by then."""
FLOOD, FLOOD_PATIENCE_S = 10, 20.0
"""Clients, in those of the steady load, and how long each of them tries."""
BAD = (Fate.WRONG, Fate.LOST)
REQUEST_LIMIT = 3
"""Requests that the router takes at once, in clients of the steady load: a flood fills it."""
POLL_S = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True)
class ChaosResult:
    """What a run saw. Times are seconds of the monotonic clock."""

    settings: ChaosSettings
    cases: tuple[Case, ...]
    texts: RightTexts
    answers: list[Answer]
    """Of the steady load and of floods."""
    happened: list[Happened]
    health: list[Health]
    lives: list[Life]
    begin_s: float
    end_s: float
    left_out: tuple[str, ...]
    """Faults and modes that this deployment cannot have, and why."""
    ended: dict[str, str]
    """Processes that had ended without a fault's doing, and their last words."""

    @property
    def unusable(self) -> dict[str, str]:
        """Hosts that could not be used when every request had ended, or `router`, and why."""
        return self.health[-1].problems if self.health else {"router": "it was never heard"}

    @property
    def growth(self) -> list[str]:
        """A sentence for each process of a run without faults that holds more and more."""
        return [] if self.settings.kinds else growth_of(self.longest.values())

    @property
    def longest(self) -> dict[str, Life]:
        """Of each process's name, the one that lived longest."""
        found: dict[str, Life] = {}
        for life in self.lives:
            if life.name not in found or life.seconds > found[life.name].seconds:
                found[life.name] = life
        return found

    @property
    def sessions_left(self) -> int:
        """Open on hosts when every request had ended."""
        return self.health[-1].sessions if self.health else 0

    @property
    def audited(self) -> int:
        """Sweeps that were computed again, by the last router."""
        return self.health[-1].audited if self.health else 0

    @property
    def accused(self) -> int:
        """Hosts that an audit took out, at worst: all of them are honest where there are audits."""
        return max((health.liars for health in self.health), default=0)

    @property
    def trouble(self) -> int:
        """What no run may have."""
        bad = sum(fate_of(answer, self.texts) in BAD for answer in self.answers)
        left = self.sessions_left + len(self.ended) + len(self.unusable) + len(self.growth)
        return bad + left + self.accused


def run_chaos(settings: ChaosSettings, say: Say) -> ChaosResult:
    """Raises OnesweepError when there is no deployment, or no text to compare with."""
    limit = settings.at_once * REQUEST_LIMIT
    with open_stand(settings.profile, settings.checkpoint, limit, settings.profiles, settings.audit) as stand:
        facts = _served(stand)
        served = [mode for mode in settings.modes if mode in facts.modes]
        if not served:
            raise InputError(f"none of --modes is served here: choose from {', '.join(facts.modes)}")
        cases = make_cases(served, settings.seed, facts.context_bytes)
        order = Order(stand.router, cases, settings.at_once, settings.patience_s)
        left_out = [f"fault {name}: {settings.absence(name)}" for name in settings.unable]
        left_out += [f"mode {mode}: it is not served here" for mode in settings.modes if mode not in served]
        schedule = make_schedule(
            _kinds(stand, settings), settings.seconds - WARM_UP_S, settings.fault_count, settings.seed
        )
        say(f"the texts of {len(cases)} requests, before anything happens ...")
        first, second = _texts(stand, order), list[bytes]()
        if Swap.name in settings.able:
            say("and with the other weights ...")
            stand.deploy()
            second = _texts(stand, order)
            stand.roll_back()
        stand.flood_order = replace(order, at_once=order.at_once * FLOOD, patience_s=FLOOD_PATIENCE_S, first=False)
        say(f"{settings.at_once} requests at once for {settings.minutes:g} min, {len(schedule)} faults ...")
        pids = {CLIENTS: 0}
        with (
            gauging(lambda: {**stand.deployment.processes, **pids}) as gauge,
            open_clients(replace(order, health=True), stand.beside) as clients,
        ):
            pids[CLIENTS] = clients.pid
            begin_s = time.monotonic()
            happened, ended = _go_through(stand, clients, schedule, begin_s + WARM_UP_S, say)
            _sleep_until(begin_s + settings.seconds, clients)
            end_s = time.monotonic()
            _end_all([*stand.floods, clients])
            ended = stand.deployment.ended() | ended
        answers = [answer for each in (clients, *stand.floods) for answer in each.answers]
        answers.sort(key=lambda answer: answer.begin_s)
        return ChaosResult(
            settings,
            cases,
            RightTexts(first, second, [fault for fault in happened if fault.kind == Swap.name]),
            answers,
            with_recoveries(happened, clients.health),
            clients.health,
            gauge.lives,
            begin_s,
            end_s,
            tuple(left_out),
            ended,
        )


def _served(stand: Stand) -> Health:
    """What the router says before anything happens. Raises ServiceError."""
    with open_clients(Order(stand.router, (), 1, patience_s=1.0, health=True), stand.beside) as clients:
        clients.wait()
    if not clients.health or clients.health[-1].problems:
        problems = "; ".join(clients.health[-1].problems.values()) if clients.health else "the router said nothing"
        raise ServiceError(f"the deployment is not whole: {problems}")
    return clients.health[-1]


def _kinds(stand: Stand, settings: ChaosSettings) -> list[Kind]:
    """The faults that can be done here, as the schedule wants them."""
    able = [FAULTS[name] for name in settings.able]
    return [Kind(fault.name, fault.weight, fault.length_s, tuple(fault.targets(stand))) for fault in able]


def _texts(stand: Stand, order: Order) -> list[bytes]:
    """The text of each case, asked for twice. Raises ServiceError when one is missing, or the two differ."""
    found: list[dict[int, Answer]] = []
    for _ in range(2):
        with open_clients(replace(order, once=True), stand.beside) as clients:
            clients.wait()
        found.append({answer.case: answer for answer in clients.answers})
    for number, case in enumerate(order.cases):
        for answers in found:
            if number not in answers or answers[number].status != OK:
                last = answers[number].tries[-1:] if number in answers else []
                why = last[0].message if last else "no answer"
                raise ServiceError(f"no text of {case.mode}, seed {case.seed}, before anything happened: {why}")
        if found[0][number].output != found[1][number].output:
            raise ServiceError(f"{case.mode}, seed {case.seed}, has two texts before anything happened")
    return [found[0][number].text for number in range(len(order.cases))]


def _go_through(
    stand: Stand, clients: Clients, schedule: Sequence[Planned], begin_s: float, say: Say
) -> tuple[list[Happened], dict[str, str]]:
    """Every fault at its time, one after the other; the next one waits until the deployment is whole again.

    Also what ended between faults, and its last words. On the main thread: what it starts in a lab ends with the
    thread that started it.
    """
    happened: list[Happened] = []
    ended: dict[str, str] = {}
    for planned in schedule:
        _sleep_until(begin_s + planned.at_s, clients)
        _wait_sound(clients, happened[-1].end_s + NOTICED_S if happened else begin_s)
        ended = stand.deployment.ended() | ended
        fault, at_s = FAULTS[planned.kind], time.monotonic()
        say(f"  {at_s - begin_s:6.1f} s  {planned.kind} {planned.target}, {planned.length_s:.1f} s")
        fault.begin(stand, planned.target)
        try:
            lasts_from_s = _used_again_s(clients, planned.target) if fault.stands_in else at_s
            _sleep_until(lasts_from_s + planned.length_s, clients)
        finally:
            with contextlib.suppress(ProcessLookupError):
                fault.end(stand, planned.target)
        happened.append(Happened(planned.kind, planned.target, at_s, time.monotonic()))
    return happened, ended


def _sleep_until(moment_s: float, clients: Clients) -> None:
    """Raises ServiceError when the clients ended meanwhile."""
    while (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(min(left_s, POLL_S))
        clients.check_alive()


def _wait_sound(clients: Clients, moment_s: float) -> None:
    """Until the router says so, after that moment; or long enough."""
    deadline = time.monotonic() + SOUND_S
    while not clients.sound_since(moment_s) and time.monotonic() < deadline:
        _sleep_until(time.monotonic() + POLL_S, clients)


def _used_again_s(clients: Clients, host: str) -> float:
    """When the router uses a host again that it has lost."""
    deadline, lost = time.monotonic() + SOUND_S, False
    while time.monotonic() < deadline:
        _sleep_until(time.monotonic() + POLL_S, clients)
        known = bool(clients.health) and host in clients.health[-1].problems
        if lost and not known:
            break
        lost = lost or known
    return time.monotonic()


def _end_all(crowds: Sequence[Clients]) -> None:
    for clients in crowds:
        clients.stop()
    for clients in crowds:
        clients.wait()


def with_recoveries(happened: Sequence[Happened], health: Sequence[Health]) -> list[Happened]:
    """Faults with the moment from which on everything was usable again, until the next one."""
    limits = [*(fault.begin_s for fault in happened), float("inf")][1:]
    return [
        replace(fault, sound_s=_sound_s([h for h in health if fault.end_s < h.at_s < limit]))
        for fault, limit in zip(happened, limits, strict=True)
    ]


def _sound_s(health: Sequence[Health]) -> float | None:
    """The first of the good words that nothing bad comes after: what has just happened is not known at once."""
    good = itertools.takewhile(lambda h: not h.problems, reversed(health))
    return min((h.at_s for h in good), default=None)
