"""The load generator's process: `python -m loadtest.load.users` reads a LoadPlan from standard input, runs its users
with locust, and writes a Recording to standard output at the end."""

from gevent import monkey

monkey.patch_all()  # before anything imports sockets or opens a channel, and in this order
from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()

import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

import gevent
import grpc
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.load.plan import OK, OPEN, LoadPlan, LoadSample, Recording, Window
from serving.client.client import Client, RequestRefused, RouterError
from stages.wire.status import STATUS_MARK, trailing_metadata

# Pause of a user after a failed request, so that a dead host is not counted thousands of times a second.
FAILURE_PAUSE_S = 1.0
AFTER_S = 0.5  # how much longer than its users locust waits for them
POLL_S = 0.05  # locust has no event for "all users are there"


class UserLog:
    """All requests of the run, open and ended."""

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
        cause = error and error.__context__  # kept by Python although the client raises its errors `from None`
        is_marked = isinstance(cause, grpc.RpcError) and STATUS_MARK in trailing_metadata(cause)
        sample = LoadSample(
            case,
            begin_s,
            time.perf_counter(),
            status,
            own_status=error is not None and not is_marked,  # else the router made it
            retry_after_ms=error.retry_after_ms if isinstance(error, RouterError) else None,
            message=str(error or ""),
            output=output.hex(),
        )
        self.samples.append(sample)
        return sample

    def close(self, **_: object) -> None:
        self.closed = True


class LoadUser(User):
    """A user who requests a text, waits for it, and requests the next."""

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
        plan, request = self.plan, self.plan.cases[case]
        settings: dict[str, Any] = {"mode": plan.mode, "max_bytes": plan.max_bytes, "timeout_s": plan.patience_s}
        self.pause_s = 0.0
        try:
            result = self.client.generate(request.prompt, seed=request.seed, **settings)
            self.ledger.end(number, OK, result.output)
        except (RouterError, RequestRefused) as error:
            sample = self.ledger.end(number, error.code.name, error=error)
            self.pause_s = (sample.retry_after_ms or FAILURE_PAUSE_S * 1000) / 1000
        except gevent.GreenletExit:
            self.ledger.end(number, OPEN)
            raise


def run_crowd(plan: LoadPlan) -> Recording:
    ledger = UserLog()
    with Client(plan.access.router, **plan.access.client_options()) as client:
        kind = type("GenerateUser", (LoadUser,), {"abstract": False, "plan": plan, "ledger": ledger, "client": client})
        environment = Environment(user_classes=[kind], stop_timeout=plan.patience_s + AFTER_S)
        environment.events.test_stopping.add_listener(ledger.close)
        runner = environment.create_local_runner()
        runner.start(plan.users, spawn_rate=plan.users)
        _wait_until(lambda: runner.user_count >= plan.users)
        gevent.sleep(plan.warm_up_s)
        window = _measure_window(plan, ledger)
        if runner.user_count:
            runner.stop()  # every user finishes its request
        for number in list(ledger.open):  # a user that could not even be killed
            ledger.end(number, OPEN)
        runner.quit()
    return Recording(ledger.samples, window)


def _measure_window(plan: LoadPlan, ledger: UserLog) -> Window:
    begin_s, processor_s = time.perf_counter(), time.process_time()
    gevent.sleep(plan.seconds)
    end_s, processor_s = time.perf_counter(), time.process_time() - processor_s
    # keep the load on until the window's own requests have ended: else the last ones would run under less load
    _wait_until(lambda: all(begun_s >= end_s for _, begun_s in ledger.open.values()), plan.patience_s)
    return Window(begin_s, end_s, processor_s)


def _wait_until(check: Callable[[], bool], max_s: float = math.inf) -> None:
    deadline = time.perf_counter() + max_s
    while not check() and time.perf_counter() < deadline:
        gevent.sleep(POLL_S)


if __name__ == "__main__":
    print(json.dumps(asdict(run_crowd(LoadPlan.from_json(sys.stdin.readline())))), flush=True)
