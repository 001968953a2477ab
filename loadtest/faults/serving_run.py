"""One run of `bench chaos`: texts without faults, load and faults on the same deployment, and each request's fate.

Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from loadtest.commands import BenchReport, echo, settings_record
from loadtest.faults.serving_testbed import (
    FAULTS,
    MAX_HOSTS,
    ServingTestbed,
    make_schedule,
    open_serving_testbed,
)
from loadtest.lab.profile import ROUTER
from loadtest.load.plan import OK, Outcome
from loadtest.simulation.schedule import PlannedFault
from loadtest.workload.caller import COMMAND, Access, Caller, RouterState
from loadtest.workload.prompts import NOVEL, SeededRequest
from loadtest.workload.testbed import LOOPBACK, block_count, check_links
from serving.router.topology import SHIPPED
from stages.errors import ServiceError

if TYPE_CHECKING:
    from loadtest.benches import ChaosSettings

POLL_S = 0.1
RECOVERY_S = 60.0  # how long the next fault waits for the deployment to recover
DETECTION_S = 1.5  # after a fault's end, the time by which the router knows its effects
LATE = "LATE"  # no complete answer within the request's patience, with any number of tries
OUTCOMES = (Outcome.RIGHT, Outcome.WRONG, Outcome.LOST)  # of a request with all its calls
# Statuses after which a client may repeat the same request.
RETRIABLE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "ABORTED"}
PAUSE_S = 0.25  # before another call, if a refusal names no time

PROMPTS = 3  # per mode
# Bytes of a text, by mode. Without a budget, `auto` takes the best setting, whatever the links are like.
LENGTHS = {"sweep": 96, "chunked": 96, "resample": 64, "ar": 48, "ar-speculative": 64, "local": 48, "auto": 48}
PROMPT_BYTES = 48
ROOM_BYTES = PROMPT_BYTES + max(LENGTHS.values()) + 16


def seeded_requests(modes: Collection[str], first_seed: int, context_length: int) -> tuple[SeededRequest, ...]:
    """Requests of all modes in turn, each with its own seed; shorter if the context lacks room."""
    scale = min(1.0, context_length / ROOM_BYTES)
    served = [(mode, length) for mode, length in LENGTHS.items() if mode in modes]
    return tuple(
        SeededRequest(NOVEL.text(i)[: int(PROMPT_BYTES * scale)], first_seed + i, mode, max(1, int(length * scale)))
        for i, (mode, length) in enumerate(served * PROMPTS)
    )


@dataclass(frozen=True)
class Answer:
    """A request, from its first call to its end."""

    case: int
    begin_s: float
    end_s: float
    status: str  # OK, LATE, or the name of a final gRPC status
    outputs: list[bytes]  # of each call, in order
    failures: list[str] = field(default_factory=list)  # messages of failed calls
    replays: int = 0  # the router's moves of the work to other hosts

    def outcome(self, text: bytes) -> Outcome:
        """One of OUTCOMES. A single wrong byte counts, also in a part that a failed call returned.

        :param text: the deployment's text before any fault.
        """
        if not all(text.startswith(each) for each in self.outputs):
            return Outcome.WRONG
        if self.status != OK:
            return Outcome.LOST
        return Outcome.RIGHT if self.outputs[-1] == text else Outcome.WRONG


class Clients:
    """Users next to the router who send the cases in turn, and repeat each until it is answered."""

    def __init__(self, caller: Caller, cases: Sequence[SeededRequest], at_once: int, patience_s: float) -> None:
        self.caller, self.cases, self.patience_s = caller, cases, patience_s
        self.answers = list[Answer]()
        self._numbers, self._stopped = itertools.cycle(range(len(cases))), threading.Event()
        self._threads = ThreadPoolExecutor(at_once)
        self._futures = [self._threads.submit(self._ask_repeatedly) for _ in range(at_once)]

    def wait(self, until_s: float) -> None:
        """Wait. Raises ServiceError if the clients' process ends meanwhile."""
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, POLL_S))
            if (code := self.caller.process.poll()) is not None:
                raise ServiceError(f"the client process exited with code {code}")

    def finish(self) -> RouterState:
        """Send no more. Wait for outstanding answers, and for all hosts to be up without remains of any request."""
        self._stopped.set()
        for each in self._futures:
            each.result()
        deadline = time.monotonic() + RECOVERY_S
        while ((state := self.caller.state()).sessions or state.problems) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return state

    def close(self) -> None:
        self._stopped.set()
        self.caller.close()
        self._threads.shutdown()

    def _ask_repeatedly(self) -> None:
        while not self._stopped.is_set():
            self.answers.append(self._ask(next(self._numbers)))

    def _ask(self, number: int) -> Answer:
        """Make one request, with as many calls as it takes."""
        begin_s, status, replays = time.monotonic(), LATE, 0
        outputs, failures = list[bytes](), list[str]()
        while (left_s := begin_s + self.patience_s - time.monotonic()) > 0:
            found = self.caller.submit({**asdict(self.cases[number]), "timeout_s": left_s}).result()
            if "error" not in found:
                outputs.append(bytes.fromhex(found["account"]["output_hex"]))
                status, replays = OK, found["account"]["replays"]
                break
            outputs.append(bytes.fromhex(found["output_hex"]))
            code, retry_ms = found["code"], found["retry_after_ms"]
            failures.append(f"{code}: {found['error']}")
            if code not in RETRIABLE:
                status = LATE if code == "DEADLINE_EXCEEDED" else code
                break
            time.sleep(PAUSE_S if retry_ms is None else retry_ms / 1000)
        return Answer(number, begin_s, time.monotonic(), status, outputs, failures, replays)


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """A run's answers, faults and processes."""

    settings: ChaosSettings
    cases: tuple[SeededRequest, ...]
    texts: list[bytes]  # before any fault, by case
    answers: list[Answer]
    faults: list[PlannedFault]  # as executed; times since the first one could begin
    last_state: RouterState  # after the end of every request
    ended: dict[str, str]  # processes that ended without a fault, and their last log lines
    seconds: float  # of load

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(answer.outcome(self.texts[answer.case]) for answer in self.answers)

    @property
    def trouble(self) -> int:
        """Number of events that must not happen in any run."""
        bad = len(self.answers) - self.outcomes[Outcome.RIGHT]
        return bad + self.last_state.sessions + len(self.ended) + len(self.last_state.problems)


def chaos(settings: ChaosSettings) -> ChaosResult:
    """Run it. Raises OnesweepError without a deployment, or without a text to compare with."""
    checkpoint = (settings.checkpoint or SHIPPED).resolve()
    block_count(checkpoint)  # refuse early, before anything is started
    check_links(settings.profile, MAX_HOSTS)
    with open_serving_testbed(settings, checkpoint) as testbed:
        facts = testbed.opened.caller.facts()
        cases = seeded_requests(facts.modes, settings.seed, facts.context_length)
        if not cases:
            raise ServiceError("this bundle writes no text: give a --checkpoint that does")
        kinds = [name for name in FAULTS if name != "cut" or settings.profile != LOOPBACK]  # loopback has no link
        schedule = make_schedule({name: FAULTS[name].targets(testbed) for name in kinds}, settings)
        echo(f"generating reference texts of {len(cases)} requests without faults ...")
        texts = _texts(testbed, cases)
        echo(f"{settings.requests_at_once} requests at once for {settings.minutes:g} min, {len(schedule)} faults ...")
        caller = Caller(testbed.opened.network.command(ROUTER, COMMAND), Access(testbed.router, insecure=True))
        with closing(Clients(caller, cases, settings.requests_at_once, settings.patience_s)) as clients:
            begin_s = time.monotonic()
            faults, ended = _run_schedule(testbed, clients, schedule, begin_s + settings.warm_up_s)
            clients.wait(begin_s + settings.seconds)
            seconds, last_state = time.monotonic() - begin_s, clients.finish()
        return ChaosResult(
            settings=settings,
            cases=cases,
            texts=texts,
            answers=sorted(clients.answers, key=lambda answer: answer.begin_s),
            faults=faults,
            last_state=last_state,
            seconds=seconds,
            ended=testbed.deployment.ended() | ended,
        )


def _texts(testbed: ServingTestbed, cases: Sequence[SeededRequest]) -> list[bytes]:
    """The text of each case, requested twice. Raises ServiceError if one is missing or the two differ."""
    # the deployment itself is the reference: a second implementation could round differently or share an error, and the
    # promise to users is that a seed has one answer
    first, again = (testbed.opened.caller.ask(list(map(asdict, cases))) for _ in range(2))
    texts = []
    for case, *answers in zip(cases, first, again, strict=True):
        name = f"{case.mode}, seed {case.seed}"
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise ServiceError(f"{name}: no answer before the first fault: {errors[0]}")
        one, other = (bytes.fromhex(answer["account"]["output_hex"]) for answer in answers)
        if one != other:
            raise ServiceError(f"{name}: two different answers before the first fault")
        texts.append(one)
    return texts


def _run_schedule(
    testbed: ServingTestbed, clients: Clients, schedule: Sequence[PlannedFault], begin_s: float
) -> tuple[list[PlannedFault], dict[str, str]]:
    """Run every fault at its time, one after the other; the next one waits until the deployment has recovered.

    Also returns the processes that ended between faults, with their last log lines. Must run on the main thread: a
    process in a lab ends with the thread that started it.
    """
    done: list[PlannedFault] = []
    ended: dict[str, str] = {}
    for planned in schedule:
        clients.wait(begin_s + max(planned.at_s, done[-1].end_s + DETECTION_S if done else 0.0))
        deadline = time.monotonic() + RECOVERY_S
        while clients.caller.state().problems and time.monotonic() < deadline:
            clients.wait(time.monotonic() + POLL_S)
        ended = testbed.deployment.ended() | ended
        echo(f"  {replace(planned, at_s=time.monotonic() - begin_s)}")
        # One at a time: with two hosts per block, two faults at once may leave no path, and then a request fails
        # rightly.
        fault_s = time.monotonic()
        end = FAULTS[planned.kind].begin(testbed, *planned.targets)
        try:
            clients.wait(fault_s + planned.length_s)
        finally:
            end()
        done.append(replace(planned, at_s=fault_s - begin_s, length_s=time.monotonic() - fault_s))
    return done, ended


# The report

MAX_SHOWN = 5


def serving_report(result: ChaosResult) -> BenchReport:
    sentences = verdict(result)
    record = {
        "settings": settings_record(result.settings),
        "seconds": result.seconds,
        "verdict": sentences,
        "requests": {"requests": len(result.answers), **{each.value: result.outcomes[each] for each in OUTCOMES}},
        "faults": list(map(asdict, result.faults)),
    }
    table = "\n" + "\n".join(f"- {words}" for words in sentences)
    return BenchReport(table, record, passed=not result.trouble)


def verdict(result: ChaosResult) -> list[str]:
    """The outcome, one sentence per line."""
    words = [
        f"{len(result.answers)} requests in {result.seconds / 60:.1f} min under {len(result.faults)} faults: "
        f"{', '.join(f'{result.outcomes[each]} {each}' for each in OUTCOMES)}; "
        f"{sum(each.replays for each in result.answers)} replays on other hosts, "
        f"{sum(len(each.failures) for each in result.answers)} failed calls",
        *(f"{name} exited: {last}" for name, last in result.ended.items()),
        *(f"not ready at the end: {name}: {problem}" for name, problem in result.last_state.problems.items()),
    ]
    if sessions := result.last_state.sessions:
        words.append(f"{sessions} sessions are still open on hosts after the last answer")
    return words + wrong_answers(result)[:MAX_SHOWN]


def wrong_answers(result: ChaosResult) -> list[str]:
    """A sentence for each request that was lost or wrong."""
    words = []
    for answer in result.answers:
        case, text = result.cases[answer.case], result.texts[answer.case]
        if (outcome := answer.outcome(text)) is not Outcome.RIGHT:
            error = answer.failures[-1] if answer.failures else "no error"
            words.append(
                f"{case.mode}, seed {case.seed}: {outcome} after {answer.end_s - answer.begin_s:.1f} s, "
                f"{answer.status} ({error}): {answer.outputs!r}, expected {text!r}"
            )
    return words
