"""The users, as locust runs them. Imported by worker.py only: importing locust changes the whole process."""

import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gevent
import gevent.event
import gevent.socket
import grpc
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from locust.html import get_html_report
from locust.runners import LocalRunner

from loadtest.load.plan import CUT, OK, OPEN, LoadPlan, LoadSample, Recording, Window
from serving.client.client import Client, RequestRefused, RouterError
from stages.wire.status import STATUS_MARK, trailing_metadata

# A user whose request failed tries again after this: a dead host must not be counted thousands of times a second.
FAILURE_PAUSE_S = 1.0
AFTER_S = 0.5  # how much longer than its users locust waits for them
POLL_S = 0.05  # locust has no event for "all users are there"
INTERRUPT_DRAIN_S = 2.0  # how long requests may go on after Ctrl-C


class UserLog:
    """Every request of the run: those that are open, and those that ended."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[int, float]] = {}
        self.samples = list[LoadSample]()
        self.closed = False
        """True if users begin no more requests: locust may kill a user that is between two, a moment late."""
        self._numbers = itertools.count()

    def begin(self, cases: int) -> tuple[int, int]:
        """(number, case) of a new request; the cases take turns."""
        number = next(self._numbers)
        self.open[number] = (number % cases, time.perf_counter())
        return number, number % cases

    def end(
        self, number: int, status: str, output: bytes = b"", error: RouterError | RequestRefused | None = None
    ) -> LoadSample:
        case, begin_s = self.open.pop(number)
        sample = LoadSample(
            case,
            begin_s,
            time.perf_counter(),
            status,
            own_status=error is not None and _own_status(error),
            retry_after_ms=error.retry_after_ms if isinstance(error, RouterError) else None,
            message=str(error or ""),
            output=output.hex(),
        )
        self.samples.append(sample)
        return sample

    def give_up(self, number: int, patience_s: float) -> None:
        """End a request that its user was torn from: lost if it had its time, else no fault of the deployment's."""
        _, begin_s = self.open[number]
        self.end(number, OPEN if time.perf_counter() - begin_s >= patience_s else CUT)

    def close(self, **_: object) -> None:
        self.closed = True


class Asker(User):
    """Asks for a text, waits for it, asks for the next."""

    abstract = True
    plan: ClassVar[LoadPlan]
    ledger: ClassVar[UserLog]
    client: ClassVar[Client]
    pause_s = 0.0

    def wait_time(self) -> float:
        """Seconds until the next request: none, unless the last one was refused or failed."""
        return self.pause_s

    @task
    def ask(self) -> None:
        if self.ledger.closed:
            raise StopUser
        number, case = self.ledger.begin(len(self.plan.cases))
        plan, asked = self.plan, self.plan.cases[case]
        settings: dict[str, Any] = {"mode": plan.mode, "max_bytes": plan.max_bytes, "timeout_s": plan.patience_s}
        error: Exception | None = None
        try:
            result = self.client.generate(asked.prompt, seed=asked.seed, **settings)
            sample = self.ledger.end(number, OK, result.output)
        except (RouterError, RequestRefused) as caught:
            error = caught
            sample = self.ledger.end(number, caught.code.name, error=caught)
        except gevent.GreenletExit:
            self.ledger.give_up(number, self.plan.patience_s)
            raise
        self.pause_s = 0.0 if error is None else (sample.retry_after_ms or FAILURE_PAUSE_S * 1000) / 1000
        self.environment.events.request.fire(
            request_type=self.plan.mode,
            name="generate",
            response_time=sample.latency_ms,
            response_length=len(sample.output) // 2,
            exception=error,
            context={},
        )


def run_crowd(plan: LoadPlan) -> Recording:
    """Run the plan to its end, or until the standard input closes."""
    ledger, stop, window = UserLog(), gevent.event.Event(), None
    gevent.spawn(_stop_when_input_ends, stop)
    with Client(plan.access.router, **plan.access.who()) as client:
        kind = type("GenerateUser", (Asker,), {"abstract": False, "plan": plan, "ledger": ledger, "client": client})
        environment = Environment(user_classes=[kind], stop_timeout=plan.patience_s + AFTER_S)
        environment.events.test_stopping.add_listener(ledger.close)
        runner = environment.create_local_runner()
        runner.start(plan.users, spawn_rate=plan.users)
        _wait_until(lambda: runner.user_count >= plan.users, stop)
        stop.wait(plan.warm_up_s)
        if not stop.is_set():
            window = _measure(plan, ledger, stop)
        _drain(runner, ledger, plan.patience_s, stop)
        if plan.html:
            Path(plan.html).write_text(get_html_report(environment), encoding="utf-8")
        runner.quit()
    return Recording(ledger.samples, window)


def _measure(plan: LoadPlan, ledger: UserLog, stop: gevent.event.Event) -> Window:
    begin_s, processor_s = time.perf_counter(), time.process_time()
    stop.wait(plan.seconds)
    window = Window(begin_s, time.perf_counter(), time.process_time() - processor_s)
    # the load stays on until the window's own requests have ended: else the last of them would have it easier
    _wait_until(lambda: all(begin_s >= window.end_s for _, begin_s in ledger.open.values()), stop, plan.patience_s)
    return window


def _drain(runner: LocalRunner, ledger: UserLog, patience_s: float, stop: gevent.event.Event) -> None:
    """Let every user finish its request; what is open after a request's patience is given up as such."""
    if runner.user_count:
        stopping = gevent.spawn(runner.stop)
        while not stopping.ready() and not stop.is_set():
            stopping.join(POLL_S)
        if not stopping.ready():
            stopping.join(INTERRUPT_DRAIN_S)
            runner.environment.stop_timeout = 0
            runner.user_greenlets.kill(block=True, timeout=INTERRUPT_DRAIN_S)
            stopping.join(INTERRUPT_DRAIN_S)
    for number in list(ledger.open):  # a user that could not even be killed
        ledger.give_up(number, patience_s)


def _own_status(error: RouterError | RequestRefused) -> bool:
    """True where the user's own gRPC made the status: it lacks the mark that a router sets."""
    cause = error.__context__  # kept by Python although the client raises its errors `from None`
    return not (isinstance(cause, grpc.RpcError) and STATUS_MARK in trailing_metadata(cause))


def _stop_when_input_ends(stop: gevent.event.Event) -> None:
    gevent.socket.wait_read(sys.stdin.fileno())
    stop.set()


def _wait_until(check: Callable[[], bool], stop: gevent.event.Event, most_s: float = math.inf) -> None:
    deadline = time.perf_counter() + most_s
    while not check() and not stop.is_set() and time.perf_counter() < deadline:
        gevent.sleep(POLL_S)
