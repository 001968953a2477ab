"""One run of `bench chaos`: answers without faults, load and faults on the same deployment, the ledger, the report."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass
from typing import Any

import psutil

from loadtest.commands import BenchReport, check_names
from loadtest.faults.base import (
    POLL_S,
    FaultRecord,
    FaultRun,
    Planned,
    Say,
    Selection,
    fault_report,
    inflict,
    make_schedule,
    seconds,
    select,
)
from loadtest.faults.clients import DRAWINGS, REQUESTS, Answer, Clients, SeededRequest, seeded_requests
from loadtest.faults.serving_ledger import Fate, counts_by_mode, fate_of, reasons, stalls, wrong_words
from loadtest.faults.serving_testbed import MOST_HOSTS, SERVING_FAULTS, ServingTestbed, open_serving_testbed
from loadtest.faults.settings import ChaosSettings
from loadtest.report.record import settings_record
from loadtest.report.table import percentile
from loadtest.workload.caller import COMMAND, Access, Caller, RouterState
from loadtest.workload.testbed import check_links
from stages.checkpoint.bundle import bundle_draws
from stages.checkpoint.shipped import SHIPPED
from stages.errors import InputError, ServiceError
from stages.host.parts import plan_host

FAULTS_A_MINUTE = 2.4
SOUND_S = 60.0  # how long the next fault waits for the deployment to be whole again
NOTICED_S = 1.5  # after a fault's end: its effects are known to the router by then

Usage = dict[str, tuple[float, int]]  # megabytes and open descriptors of each process


@dataclass(frozen=True, kw_only=True)
class ChaosResult(FaultRun):
    """A run's answers, faults and processes."""

    settings: ChaosSettings
    cases: tuple[SeededRequest, ...]
    texts: list[bytes]  # before any fault, by case
    answers: list[Answer]
    faults: list[FaultRecord]
    health: list[RouterState]
    usages: tuple[Usage, Usage]  # before the first fault, and at the end

    @property
    def last_state(self) -> RouterState:
        """When every request had ended."""
        return self.health[-1]

    @property
    def accused(self) -> int:
        """Hosts that an audit took out, at worst: all of them are honest where there are audits."""
        return max((health.liars for health in self.health), default=0)

    @property
    def trouble(self) -> int:
        """The number of things that no run may have."""
        bad = sum(fate_of(answer, self.texts) is not Fate.RIGHT for answer in self.answers)
        left = self.last_state.sessions + len(self.ended) + len(self.last_state.problems)
        return bad + left + self.accused


def check_chaos(settings: ChaosSettings) -> Selection[ServingTestbed]:
    """The faults of a run. Raises OnesweepError for what can be refused before anything is started."""
    checkpoint = (settings.checkpoint or SHIPPED).resolve()
    plan_host(checkpoint, (0,))
    selection = select(SERVING_FAULTS, settings, FAULTS_A_MINUTE)
    check_names("--modes", settings.modes or (), tuple(DRAWINGS if bundle_draws(checkpoint) else REQUESTS))
    check_links(settings.profile, MOST_HOSTS, settings.profiles)
    return selection


def chaos(settings: ChaosSettings, say: Say) -> ChaosResult:
    """Raises OnesweepError when there is no deployment, or no text to compare with."""
    selection = check_chaos(settings)
    with open_serving_testbed(settings, (settings.checkpoint or SHIPPED).resolve()) as testbed:
        facts = testbed.opened.caller.facts()
        wanted = settings.modes or tuple(DRAWINGS if facts.classes else REQUESTS)
        served = [mode for mode in wanted if mode in facts.modes]
        if not served:
            raise InputError(f"none of --modes is served here: choose from {', '.join(facts.modes)}")
        cases = seeded_requests(served, settings.seed, facts.context_length, facts.classes)
        left_out = [*selection.left_out, *(f"mode {m}: it is not served here" for m in wanted if m not in served)]
        faulty_s = settings.seconds - settings.warm_up_s
        schedule = make_schedule(
            selection.able, testbed, faulty_s, selection.count, settings.seed, settings.length_scale
        )
        say(f"the answers to {len(cases)} requests, before anything happens ...")
        texts = _texts(testbed, cases)
        say(f"{settings.requests_at_once} requests at once for {settings.minutes:g} min, {len(schedule)} faults ...")
        caller = Caller(testbed.opened.beside(COMMAND), Access(testbed.router, insecure=True))
        with closing(Clients(caller, cases, settings.requests_at_once, settings.patience_s)) as clients:
            begin_s = time.monotonic()
            _wait(clients, begin_s + settings.warm_up_s)
            before = usage_of(testbed.deployment.processes)
            faults, ended = _go_through(testbed, clients, schedule, begin_s + settings.warm_up_s, say)
            _wait(clients, begin_s + settings.seconds)
            end_s = time.monotonic()
            clients.wait()
            usages = before, usage_of(testbed.deployment.processes)
            ended = testbed.deployment.ended() | ended
        return ChaosResult(
            settings=settings,
            cases=cases,
            texts=texts,
            answers=sorted(clients.answers, key=lambda answer: answer.begin_s),
            faults=faults,
            health=clients.health,
            usages=usages,
            begin_s=begin_s,
            end_s=end_s,
            left_out=tuple(left_out),
            ended=ended,
        )


def usage_of(pids: Mapping[str, int]) -> Usage:
    """Memory and descriptors of the processes that are there."""
    found: Usage = {}
    for name, pid in pids.items():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found[name] = process.memory_info().rss / 2**20, process.num_fds()
    return found


def _texts(testbed: ServingTestbed, cases: Sequence[SeededRequest]) -> list[bytes]:
    """The text or pixels of each case, asked for twice. Raises ServiceError when one is missing, or the two differ."""
    # the deployment itself is the reference: a second implementation could round differently, or be wrong in the same
    # way, and the promise to users is that a seed has one answer
    first, again = (testbed.opened.caller.ask([case.call for case in cases]) for _ in range(2))
    texts = []
    for case, *answers in zip(cases, first, again, strict=True):
        name = f"{case.mode}, seed {case.seed}"
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise ServiceError(f"no answer in {name}, before anything happened: {errors[0]}")
        one, other = (bytes.fromhex(answer["account"]["output_hex"]) for answer in answers)
        if one != other:
            raise ServiceError(f"{name}, has two answers before anything happened")
        texts.append(one)
    return texts


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


# The report


SHOWN = 5
MODE_HEAD = (
    *("mode", "requests", "right", "wrong", "lost", "replays", "refused", "called again"),
    *("p50 s", "p95 s", "max s"),
)
FAULT_HEAD = ("fault", "times", "requests", "next byte p50 s", "p95 s", "max s")
USAGE_HEAD = ("process", "MB before the faults", "at the end", "descriptors before the faults", "at the end")


def serving_report(result: ChaosResult) -> BenchReport:
    """The report of `bench chaos`."""
    tables = {
        "Requests": (MODE_HEAD, mode_rows(result)),
        "What faults cost the requests that they hit": (FAULT_HEAD, fault_rows(result)),
        "Processes": (USAGE_HEAD, usage_rows(result)),
    }
    return fault_report(tables, verdict(result), chaos_record(result), result.trouble)


def mode_rows(result: ChaosResult) -> list[list[str]]:
    rows = []
    for mode, counted in counts_by_mode(result.answers, result.cases, result.texts).items():
        *counts, p50_s, p95_s, most_s = astuple(counted)
        rows.append([mode, *map(str, counts), seconds(p50_s), seconds(p95_s), seconds(most_s)])
    return rows


def fault_rows(result: ChaosResult) -> list[list[str]]:
    times = Counter(fault.kind for fault in result.faults)
    return [
        [kind, str(times[kind]), str(len(waits_s)), *(seconds(percentile(waits_s, p)) for p in (50, 95, 100))]
        for kind, waits_s in stalls(result.answers, result.faults).items()
    ]


def usage_rows(result: ChaosResult) -> list[list[str]]:
    """Memory and descriptors of the processes that were there both times, killed meanwhile or not."""
    before, after = result.usages
    return [
        [name, f"{before[name][0]:.0f}", f"{after[name][0]:.0f}", str(before[name][1]), str(after[name][1])]
        for name in sorted(before.keys() & after.keys())
    ]


def verdict(result: ChaosResult) -> list[str]:
    """The outcome, a sentence a line."""
    total = counts_by_mode(result.answers, result.cases, result.texts)["all"]
    words = [
        f"{total.requests} requests in {result.seconds / 60:.1f} min under {len(result.faults)} faults: "
        f"{total.right} right, {total.wrong} wrong, {total.lost} lost; {total.replays} replays on other hosts, "
        f"{total.refused} refusals with a time to come back, {total.repeated} calls made again for another reason"
    ]
    if result.settings.audit:
        audited = f"{result.last_state.audited} sweeps audited since the router last started"
        words.append(f"{audited}, {result.accused} honest hosts accused")
    words += result.remarks
    words += [f"not usable at the end: {name}: {problem}" for name, problem in result.last_state.problems.items()]
    if sessions := result.last_state.sessions:
        words.append(f"{sessions} sessions are still open on hosts after the last answer")
    words += [f"called again {count} x: {why}" for why, count in reasons(result.answers).most_common(SHOWN)]
    return words + wrong_words(result.answers, result.cases, result.texts)[:SHOWN]


def chaos_record(result: ChaosResult) -> dict[str, Any]:
    counts = counts_by_mode(result.answers, result.cases, result.texts)
    return {
        "settings": settings_record(result.settings),
        "seconds": result.seconds,
        "verdict": verdict(result),
        "modes": {mode: asdict(each) for mode, each in counts.items()},
        "faults": list(map(result.times_of, result.faults)),
        "stalls": {kind: {"waits_s": waits_s} for kind, waits_s in stalls(result.answers, result.faults).items()},
        "processes": dict(zip(("before", "after"), result.usages, strict=True)),
    }
