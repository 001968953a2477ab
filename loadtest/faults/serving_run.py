"""One run of `bench chaos`: answers without faults, load and faults on the same deployment, then the ledger."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from loadtest.faults.base import (
    POLL_S,
    Conditions,
    FaultRecord,
    FaultRun,
    Planned,
    Say,
    Selection,
    check_links,
    check_names,
    inflict,
    make_schedule,
    select,
)
from loadtest.faults.clients import (
    DRAWINGS,
    OK,
    REQUESTS,
    Answer,
    Clients,
    Order,
    RouterHealth,
    SeededRequest,
    seeded_drawings,
    seeded_requests,
)
from loadtest.faults.serving_ledger import Fate, RightTexts, ServingFaultRecord, fate_of, with_recoveries
from loadtest.faults.serving_testbed import MOST_HOSTS, SERVING_FAULTS, ServingTestbed, open_serving_testbed
from loadtest.faults.settings import ChaosSettings
from loadtest.faults.usage import CLIENTS, ProcessUsage, sampling
from serving.cli.deployment import SHIPPED
from stages.checkpoint.manifest import bundle_draws
from stages.errors import InputError, ServiceError
from stages.host.parts import plan_host

FAULTS_A_MINUTE = 2.4
SOUND_S = 60.0  # how long the next fault waits for the deployment to be whole again
NOTICED_S = 1.5  # after a fault's end: its effects are known to the router by then
FLOOD, FLOOD_PATIENCE_S = 10, 20.0  # clients of a flood, in those of the steady load, and how long each of them tries
REQUEST_LIMIT = 3  # requests that the router takes at once, in clients of the steady load: a flood fills it
SWAP = "swap"


@dataclass(frozen=True, kw_only=True)
class ChaosResult(FaultRun):
    """A run's answers, faults and processes."""

    settings: ChaosSettings
    cases: tuple[SeededRequest, ...]
    texts: RightTexts
    answers: list[Answer]  # of the steady load and of floods
    faults: list[ServingFaultRecord]
    health: list[RouterHealth]
    usages: list[ProcessUsage]

    @property
    def unusable(self) -> dict[str, str]:
        """Hosts that could not be used when every request had ended, or `router`, and why."""
        return self.health[-1].problems if self.health else {"router": "it was never heard"}

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
        """The number of things that no run may have."""
        bad = sum(fate_of(answer, self.texts) in (Fate.WRONG, Fate.LOST) for answer in self.answers)
        left = self.sessions_left + len(self.ended) + len(self.unusable)
        return bad + left + self.accused


def check_chaos(settings: ChaosSettings) -> Selection[ServingTestbed]:
    """The faults of a run. Raises OnesweepError for what can be refused before anything is started."""
    checkpoint = (settings.checkpoint or SHIPPED).resolve()
    plan_host(checkpoint, (0,))
    conditions = Conditions(settings.profile, checkpoint, settings.audit, settings.routers)
    selection = select(SERVING_FAULTS, settings, conditions, FAULTS_A_MINUTE)
    check_names("--modes", settings.modes or (), tuple(DRAWINGS if bundle_draws(checkpoint) else REQUESTS))
    check_links(settings.profile, settings.profiles, MOST_HOSTS)
    return selection


def run_chaos(settings: ChaosSettings, say: Say) -> ChaosResult:
    """Raises OnesweepError when there is no deployment, or no text to compare with."""
    selection = check_chaos(settings)
    limit, checkpoint = settings.requests_at_once * REQUEST_LIMIT, (settings.checkpoint or SHIPPED).resolve()
    with open_serving_testbed(settings, checkpoint, limit) as testbed:
        facts = _router_health(testbed)
        wanted = settings.modes or tuple(DRAWINGS if facts.classes else REQUESTS)
        served = [mode for mode in wanted if mode in facts.modes]
        if not served:
            raise InputError(f"none of --modes is served here: choose from {', '.join(facts.modes)}")
        if facts.classes:
            cases = seeded_drawings(served, settings.seed, facts.classes)
        else:
            cases = seeded_requests(served, settings.seed, facts.context_length)
        order = Order(testbed.router, cases, settings.requests_at_once, settings.patience_s)
        left_out = [*selection.left_out, *(f"mode {m}: it is not served here" for m in wanted if m not in served)]
        seconds = settings.seconds - settings.warm_up_s
        schedule = make_schedule(
            selection.able, testbed, seconds, selection.count, settings.seed, settings.length_scale
        )
        say(f"the answers to {len(cases)} requests, before anything happens ...")
        first, second = _texts(testbed, order), list[bytes]()
        if selection.has(SWAP):
            say("and with the other weights ...")
            testbed.deploy()
            second = _texts(testbed, order)
            testbed.roll_back()
        flooding = settings.requests_at_once * FLOOD
        testbed.flood_order = replace(order, at_once=flooding, patience_s=FLOOD_PATIENCE_S, first=False)
        say(f"{settings.requests_at_once} requests at once for {settings.minutes:g} min, {len(schedule)} faults ...")
        pids = {CLIENTS: 0}
        with (
            sampling(lambda: {**testbed.deployment.processes, **pids}) as usages,
            closing(Clients(replace(order, health=True), testbed.beside)) as clients,
        ):
            pids[CLIENTS] = clients.pid
            begin_s = time.monotonic()
            done, ended = _go_through(testbed, clients, schedule, begin_s + settings.warm_up_s, say)
            _wait(clients, begin_s + settings.seconds)
            end_s = time.monotonic()
            crowds = [*testbed.floods, clients]
            for crowd in crowds:
                crowd.stop()
            for crowd in crowds:
                crowd.wait()
            ended = testbed.deployment.ended() | ended
        faults = with_recoveries(done, clients.health)
        answers = sorted((answer for crowd in crowds for answer in crowd.answers), key=lambda answer: answer.begin_s)
        return ChaosResult(
            settings=settings,
            cases=cases,
            texts=RightTexts(first, second, [fault for fault in faults if fault.kind == SWAP]),
            answers=answers,
            faults=faults,
            health=clients.health,
            usages=usages,
            begin_s=begin_s,
            end_s=end_s,
            left_out=tuple(left_out),
            ended=ended,
        )


def _router_health(testbed: ServingTestbed) -> RouterHealth:
    """The hosts before anything happens. Raises ServiceError unless all of them can be used."""
    with closing(Clients(Order(testbed.router, (), 1, patience_s=1.0, health=True), testbed.beside)) as clients:
        clients.wait()
    if not clients.health or clients.health[-1].problems:
        problems = "; ".join(clients.health[-1].problems.values()) if clients.health else "the router said nothing"
        raise ServiceError(f"the deployment is not whole: {problems}")
    return clients.health[-1]


def _texts(testbed: ServingTestbed, order: Order) -> list[bytes]:
    """The text or pixels of each case, asked for twice. Raises ServiceError when one is missing, or the two differ."""
    # the deployment itself is the reference: a second implementation could round differently, or be wrong in the same
    # way, and the promise to users is that a seed has one answer
    count = len(order.cases)
    with closing(Clients(replace(order, cases=order.cases * 2, once=True), testbed.beside)) as clients:
        clients.wait()
    answers = {answer.case: answer for answer in clients.answers}
    for number, case in enumerate(order.cases * 2):
        if number not in answers or answers[number].status != OK:
            last = answers[number].tries[-1:] if number in answers else []
            why = last[0].message if last else "no answer"
            raise ServiceError(f"no answer in {case.mode}, seed {case.seed}, before anything happened: {why}")
    for number, case in enumerate(order.cases):
        if answers[number].output != answers[number + count].output:
            raise ServiceError(f"{case.mode}, seed {case.seed}, has two answers before anything happened")
    return [answers[number].text for number in range(count)]


def _go_through(
    testbed: ServingTestbed, clients: Clients, schedule: Sequence[Planned], begin_s: float, say: Say
) -> tuple[list[FaultRecord], dict[str, str]]:
    """Every fault at its time, one after the other; the next one waits until the deployment is whole again.

    Also the processes that ended between faults, with their last words. Must run on the main thread: a process that
    is started in a lab ends with the thread that started it.
    """
    done: list[FaultRecord] = []
    ended: dict[str, str] = {}

    def tick() -> None:
        _wait(clients, time.monotonic() + POLL_S)

    def used_again(host: str) -> None:
        _wait_for(clients, lambda: clients.misses(host))
        _wait_for(clients, lambda: not clients.misses(host))

    for planned in schedule:
        _wait(clients, begin_s + planned.at_s)
        since_s = done[-1].end_s + NOTICED_S if done else begin_s
        _wait_for(clients, lambda since_s=since_s: clients.sound_since(since_s))  # type: ignore[misc]
        ended = testbed.deployment.ended() | ended
        at_s = time.monotonic() - begin_s
        say(f"  {at_s:6.1f} s  {planned.kind} {planned.target}, {planned.length_s:.1f} s")
        fault = SERVING_FAULTS[planned.kind]
        done.append(inflict(fault, testbed, planned.target, planned.length_s, tick, used_again))
    return done, ended


def _wait(clients: Clients, until_s: float) -> None:
    """Raises ServiceError when the clients ended meanwhile."""
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, POLL_S))
        clients.check_alive()


def _wait_for(clients: Clients, happened: Callable[[], bool]) -> None:
    """Wait until something happened; or SOUND_S."""
    deadline = time.monotonic() + SOUND_S
    while not happened() and time.monotonic() < deadline:
        _wait(clients, time.monotonic() + POLL_S)
