"""A client process next to the router, which reads calls as lines of JSON and writes answers.

A lab's addresses exist only in its namespaces, so a benchmark cannot call the router from its own process. The process
is `python -m loadtest.workload.caller`: its first line is an `Access`, each further line a number and a call, or `null`
for the router's status; a line with the number and the answer comes back. `Caller` is the parent's end of it.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from loadtest.lab.lab import Child
from serving.client.client import Client, DrawnPictures, RequestRefused, Result, RouterError
from stages.errors import InputError, OnesweepError, ServiceError, exit_code_of
from stages.wire.channel import check_target
from stages.wire.tls import LOOPBACK_ONLY, Tls, security_of

# -P: import nothing from the working directory
COMMAND = [sys.executable, "-P", "-m", "loadtest.workload.caller"]
MAX_AT_ONCE = 1024
STOP_S = 5.0  # how long to wait for running calls
POLL_S = 0.1
TIMEOUT_S = 900.0  # 256 bytes of `ar` round a ring of 3 x 150 ms take 115 s, many candidates of a large model longer

Answer = dict[str, Any]


@dataclass(frozen=True)
class Access:
    """A router's address and how to connect to it, as JSON values for other processes."""

    router: str
    authority: str = ""  # file with the certificate authority to trust; empty: plain text
    insecure: bool = False  # plain text may leave the machine

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self | None:
        """Read `--router`, `--tls-ca` and `--insecure`; None without a router. Raises InputError."""
        security = security_of(options)
        if options.router is None:
            if security != LOOPBACK_ONLY:
                raise InputError("--tls-ca and --insecure need --router: a deployment started here uses neither")
            return None
        check_target(options.router, security, "--router")
        return cls(options.router, str(security.tls.authority) if security.tls else "", security.insecure)

    def client_options(self) -> dict[str, Any]:
        return {"tls": Tls(Path(self.authority)) if self.authority else None, "insecure": self.insecure}


@dataclass(frozen=True)
class RouterState:
    """Status of a router, as JSON values."""

    at_s: float  # seconds of the monotonic clock, which all processes share
    # Why a host or one of its links cannot be used, by host name; `router` if the router does not answer.
    problems: dict[str, str]
    ready: bool = False
    modes: list[str] = field(default_factory=list)  # drawing modes, if it draws
    hosts: int = 0
    context_length: int = 0
    request_limit: int = 0
    classes: list[str] = field(default_factory=list)  # classes that it draws; empty if it generates text
    sessions: int = 0  # open on all hosts

    @classmethod
    def of(cls, client: Client) -> Self:
        at_s = time.monotonic()
        try:
            found = client.status()
        except OnesweepError as error:
            return cls(at_s, {"router": str(error)})
        links = {host.name: [link.problem for link in host.links if link.problem] for host in found.hosts}
        problems = {host.name: host.reason or next(iter(links[host.name]), "") for host in found.hosts}
        classes = list(found.pictures.classes)
        return cls(
            at_s,
            {name: problem for name, problem in problems.items() if problem},
            found.ready,
            list(found.drawing_modes if classes else found.modes),
            len(found.hosts),
            found.context_tokens,
            found.request_limit,
            classes,
            sum(host.sessions for host in found.hosts),
        )


class Caller(Child):
    """The parent's end of a caller process. Several threads may use it at once."""

    def __init__(self, command: list[str], access: Access) -> None:
        """:param command: COMMAND, wrapped so that it can reach the router."""
        super().__init__(command, asdict(access))
        self.access = access
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._pending: dict[int, Future[Answer]] | None = {}  # None once the process has ended
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, call: dict[str, Any] | None) -> Future[Answer]:
        """Make a call or get the status. A failure is an answer with `error`; OnesweepError: the process ended."""
        number, future = next(self._numbers), Future[Answer]()
        with self._lock:
            if self._pending is None:
                future.set_exception(self._ended())
            else:
                self._pending[number] = future
                self.send([number, call])
        return future

    def ask(self, calls: list[dict[str, Any]]) -> list[Answer]:
        """Make these calls at once and return the answers in order. Raises OnesweepError if the process ended."""
        return [future.result() for future in [self.submit({"timeout_s": TIMEOUT_S, **call}) for call in calls]]

    def state(self) -> RouterState:
        """The router's status, whatever it is. Raises OnesweepError if the process ended."""
        return RouterState(**self.submit(None).result())

    def facts(self) -> RouterState:
        """The router's status. Raises ServiceError if it does not answer or its hosts are not ready."""
        found = self.state()
        if not found.ready:
            raise ServiceError(f"the router at {self.access.router} is not ready: {'; '.join(found.problems.values())}")
        return found

    def answers(self) -> Iterator[str | None]:
        """Yield, again and again, why the router cannot serve: empty when it can, None when it does not answer."""
        while True:
            found = self.state()
            reason = "" if found.ready else "; ".join(found.problems.values()) or "not ready"
            yield None if "router" in found.problems else reason
            time.sleep(POLL_S)

    def close(self) -> None:
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.process.kill()
        self._reader.join()  # no two may read its output
        self.end(0.0)

    def _read(self) -> None:
        for line in self.lines():
            number, reply = json.loads(line)
            assert self._pending is not None
            self._pending.pop(number).set_result(reply)
        with self._lock:
            left, self._pending = self._pending or {}, None
        for future in left.values():
            future.set_exception(self._ended())

    def _ended(self) -> OnesweepError:
        return OnesweepError(f"the client process of the benchmark exited with code {self.process.wait()}")


def answer(client: Client, call: dict[str, Any]) -> Answer:
    """Make one call: the times of its pieces on the monotonic clock, in seconds, and the time to its account's end."""
    begin_s, output, arrivals_s = time.monotonic(), b"", list[float]()
    account: dict[str, Any] = {}
    try:
        for item in _pieces(client, call):
            if isinstance(item, bytes):
                output += item
                arrivals_s.append(time.monotonic())
            else:
                account = item.as_json()
        end_s = time.monotonic()
        if not account or not arrivals_s:
            raise ServiceError("the router closed the stream without a summary")
    except OnesweepError as error:
        return {
            "error": str(error),
            "exit_code": exit_code_of(error),
            "code": error.code.name if isinstance(error, RouterError | RequestRefused) else "",
            "retry_after_ms": error.retry_after_ms if isinstance(error, RouterError) else None,
            "output_hex": output.hex(),
            "arrivals_s": arrivals_s,
        }
    return {
        "latency_ms": (end_s - begin_s) * 1000,
        "first_byte_ms": (arrivals_s[0] - begin_s) * 1000,
        "arrivals_s": arrivals_s,
        "account": {"output_hex": output.hex()} | account,
    }


def _pieces(client: Client, call: dict[str, Any]) -> Iterator[bytes | Result | DrawnPictures]:
    """Yield pieces of the answer as they come, then its account. Pictures come in one piece."""
    if "classes" not in call:
        yield from client.stream(**call)
        return
    drawn = client.draw(**call)
    yield drawn.pixels.tobytes()
    yield drawn


def main() -> None:
    """Answer lines until standard input ends."""
    access, printing = Access(**json.loads(sys.stdin.readline())), threading.Lock()

    def respond(number: int, call: dict[str, Any] | None) -> None:
        try:
            reply = asdict(RouterState.of(client)) if call is None else answer(client, call)
        except Exception:  # else the parent would wait for this answer for ever
            traceback.print_exc()
            os._exit(1)
        with printing:
            print(json.dumps([number, reply]), flush=True)

    with Client(access.router, **access.client_options()) as client, ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        for line in sys.stdin:
            threads.submit(respond, *json.loads(line))


if __name__ == "__main__":
    main()
