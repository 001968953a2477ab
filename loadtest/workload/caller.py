"""A client process beside the router: calls come in as lines of JSON, answers go out.

A lab's addresses exist in its namespaces only, so a benchmark cannot call the router from its own process. The process
is `python -m loadtest.workload.caller`: its first line is an `Access`, each further line a list of calls to
make at once, or `null` for the router's status. `Caller` is the parent's end of it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from loadtest.lab.child import Child
from serving.client.client import Client, Result
from stages.errors import InputError, OnesweepError, ServiceError
from stages.wire.channel import check_target
from stages.wire.flags import add_client_options
from stages.wire.tls import LOOPBACK_ONLY, Tls, security_of

# -P: not what lies in the working directory
COMMAND = [sys.executable, "-P", "-m", "loadtest.workload.caller"]
MAX_AT_ONCE = 64  # requests that a router takes by default
STOP_S = 5.0  # a call that still runs is not waited for
STATUS_TIMEOUT_S = 5.0
POLL_S = 0.1
TIMEOUT_S = 900.0  # 256 bytes of `ar` round a ring of 3 x 150 ms take 115 s, many candidates of a large model longer


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add `--router`, `--tls-ca` and `--insecure`."""
    parser.add_argument("--router", metavar="HOST:PORT", help="a running deployment, instead of starting one")
    add_client_options(parser)


@dataclass(frozen=True)
class Access:
    """Address of a router and how to connect to it, as JSON values: other processes receive it."""

    router: str
    authority: str = ""  # file with the certificate authority to trust; empty: plain text
    insecure: bool = False  # plain text may leave the machine

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self | None:
        """Read the options of `add_access_options`; None where no router is named. Raises InputError."""
        security = security_of(options)
        if options.router is None:
            if security != LOOPBACK_ONLY:
                raise InputError("--tls-ca and --insecure go with --router: what is started here needs neither")
            return None
        check_target(options.router, security, "--router")
        return cls(options.router, str(security.tls.authority) if security.tls else "", security.insecure)

    def who(self) -> dict[str, Any]:
        """Settings of a client."""
        return {"tls": Tls(Path(self.authority)) if self.authority else None, "insecure": self.insecure}


@dataclass(frozen=True)
class RouterState:
    """Status of a router, as JSON values."""

    ready: bool
    problem: str
    modes: list[str]  # of drawing, where it draws
    hosts: int
    context_length: int
    request_limit: int
    classes: list[str] = field(default_factory=list)  # that are drawn; empty where text is written

    @classmethod
    def of(cls, client: Client) -> Self:
        """Raises ServiceError when no router answers."""
        found = client.status(STATUS_TIMEOUT_S)
        problem = "; ".join(host.reason for host in found.hosts if host.reason)
        classes = list(found.pictures.classes)
        return cls(
            found.ready,
            problem,
            list(found.drawing_modes if classes else found.modes),
            len(found.hosts),
            found.context_tokens,
            found.request_limit,
            classes,
        )


class Caller(Child):
    """The parent's end of a caller process."""

    def __init__(self, command: list[str], access: Access) -> None:
        """:param command: COMMAND, placed where it can reach the router."""
        super().__init__(command, asdict(access))
        self.access = access

    def ask(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Make these calls at once and return their answers in order. Raises OnesweepError when the process ended."""
        answers: list[dict[str, Any]] = self._exchange([{"timeout_s": TIMEOUT_S, **call} for call in calls])
        return answers

    def facts(self) -> RouterState:
        """The router's status. Raises ServiceError when it does not answer, or its hosts are not ready."""
        answer = self._exchange(None)
        check_answer(answer)
        if not answer["ready"]:
            raise ServiceError(f"the router at {self.access.router} is not ready: {answer['problem']}")
        return RouterState(**answer)

    def answers(self) -> Iterator[str | None]:
        """Again and again: why the router cannot serve, empty when it can, None when it does not answer."""
        while True:
            found = self._exchange(None)
            yield None if "error" in found else "" if found["ready"] else found["problem"] or "not ready"
            time.sleep(POLL_S)

    def close(self) -> None:
        self.end(STOP_S)

    def _exchange(self, value: object) -> Any:  # noqa: ANN401 - JSON
        self.send(value)
        if not (line := next(self.lines(), "")):
            raise OnesweepError(f"the client process of the benchmark ended (exit code {self.process.wait()})")
        return json.loads(line)


def check_answer(answer: dict[str, Any]) -> None:
    """Raises InputError or ServiceError for an answer that is an error."""
    if "error" in answer:
        raise (InputError if answer["exit_code"] == InputError.exit_code else ServiceError)(answer["error"])


def answer(client: Client, call: dict[str, Any]) -> dict[str, Any]:
    """Make one call and time it to the end of its account. A failure is an answer with `error`."""
    begin, first = time.perf_counter(), None
    result: Result | None = None
    try:
        if "classes" in call:
            drawn = client.draw(call.pop("classes"), **call)
            took_ms = (time.perf_counter() - begin) * 1000
            account = drawn.as_json() | {"output_hex": drawn.pixels.tobytes().hex()}
            return {"latency_ms": took_ms, "first_byte_ms": took_ms, "account": account}
        for item in client.stream(call.pop("prompt"), **call):
            if isinstance(item, Result):
                result = item
            elif first is None:
                first = time.perf_counter()
        end = time.perf_counter()
    except OnesweepError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    if result is None or first is None:
        return {"error": "the router ended the answer without an account", "exit_code": ServiceError.exit_code}
    return {"latency_ms": (end - begin) * 1000, "first_byte_ms": (first - begin) * 1000, "account": result.as_json()}


def status(client: Client) -> dict[str, Any]:
    """The router's status as `RouterState`, or an answer with `error`."""
    try:
        return asdict(RouterState.of(client))
    except OnesweepError as error:
        return {"error": str(error), "exit_code": error.exit_code}


def main() -> None:
    """Answer lines until standard input ends."""
    access = Access(**json.loads(sys.stdin.readline()))
    with Client(access.router, **access.who()) as client, ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        for line in sys.stdin:
            calls = json.loads(line)
            if calls is None:
                answers: object = status(client)
            elif len(calls) == 1:
                answers = [answer(client, calls[0])]
            else:
                answers = list(threads.map(lambda call: answer(client, call), calls))
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
