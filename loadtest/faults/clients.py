"""Clients beside the router that ask until they are answered: `python -m loadtest.faults.clients`.

The process reads an Order from its standard input, asks until that closes, then lets what is under way end. Answers
and what the router says of its hosts go to its standard output, a JSON message a line. `Clients` is that process as
its parent sees it. Times are seconds of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.lab.child import Child, from_line, to_line
from loadtest.workload.prompts import NOVEL
from serving.client.client import AsyncClient, DrawnPictures, RequestRefused, Result, RouterError
from serving.drawing import DRAWING_MODES
from stages.errors import ServiceError

OK = "OK"
LATE = "LATE"  # no whole answer within the request's patience, however often it was tried
# Statuses after which the same request may be sent again.
AGAIN = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "ABORTED"}
PAUSE_S = 0.25  # before another call, where a refusal names no time
HEALTH_S = 0.5
SETTLE_S = 60.0  # how long after the last answer hosts may be lost, or hold sessions
GRACE_S = SETTLE_S + 10.0  # how long the process may take beyond its requests' patience
COMMAND = [sys.executable, "-P", "-m", "loadtest.faults.clients"]

PROMPTS = 3  # of each mode
# Settings of a request, by its mode.
REQUESTS: dict[str, dict[str, Any]] = {
    "sweep": {"max_bytes": 96},
    "chunked": {"max_bytes": 96, "chunk": 16},
    "resample": {"max_bytes": 64, "candidates": 16},
    "ar": {"max_bytes": 48},
    "ar-speculative": {"max_bytes": 64},
    "local": {"max_bytes": 48},
    "auto": {"max_bytes": 48},  # without a budget it takes the best setting, whatever the links are like
}
PROMPT_BYTES = 48
ROOM_BYTES = PROMPT_BYTES + 96 + 16
# Of a request for pictures. Guidance and solver are the router's defaults.
DRAWINGS: dict[str, dict[str, Any]] = {mode: {"pictures": 2, "levels": 12} for mode in DRAWING_MODES}

Beside = Callable[[list[str]], list[str]]  # turns a command into one that runs where the router does


@dataclass(frozen=True)
class SeededRequest:
    """A request that has one answer: a text, or pictures."""

    mode: str
    prompt: str  # or the class to draw
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    draws: bool = False

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of `Client.stream` or `Client.draw`."""
        return {
            "classes" if self.draws else "prompt": self.prompt,
            "mode": self.mode,
            "seed": self.seed,
            **self.settings,
        }


def seeded_requests(
    modes: Collection[str], first_seed: int, context_length: int, classes: Sequence[str] = ()
) -> tuple[SeededRequest, ...]:
    """Requests of all modes in turn, each with a seed of its own; shorter where the context has no room.

    :param classes: that are drawn, and take turns; empty where text is written.
    """
    scale = min(1.0, context_length / ROOM_BYTES)
    cases: list[SeededRequest] = []
    for turn, (mode, settings) in itertools.product(range(PROMPTS), (DRAWINGS if classes else REQUESTS).items()):
        number = len(cases)
        prompt, seed = NOVEL.text(number)[: int(PROMPT_BYTES * scale)], first_seed + 100 * turn + number
        if mode in modes and classes:
            cases.append(SeededRequest(mode, classes[number % len(classes)], seed, settings, draws=True))
        elif mode in modes:
            shorter = {**settings, "max_bytes": max(1, int(settings["max_bytes"] * scale))}
            cases.append(SeededRequest(mode, prompt, seed, shorter))
    return tuple(cases)


@dataclass(frozen=True)
class Order:
    """The requests of one process."""

    router: str
    cases: tuple[SeededRequest, ...]
    at_once: int
    patience_s: float

    @classmethod
    def from_json(cls, text: str) -> Order:
        table: dict[str, Any] = json.loads(text)
        return cls(**{**table, "cases": tuple(SeededRequest(**case) for case in table["cases"])})


# Messages


@dataclass(frozen=True)
class Try:
    """One call that brought no whole answer."""

    begin_s: float
    end_s: float
    code: str
    message: str
    retry_after_ms: int | None = None
    output: str = ""  # the text, or pixels, until then, in hex

    @property
    def refused(self) -> bool:
        """True of a refusal that names a time to come back."""
        return self.code == "RESOURCE_EXHAUSTED" and self.retry_after_ms is not None


@dataclass(frozen=True)
class Answer:
    """A request from its first call to its end."""

    case: int
    begin_s: float
    end_s: float
    status: str  # OK, LATE, or the name of a gRPC status that another call would not change
    output: str = ""  # of the last call, in hex
    arrivals_s: list[float] = field(default_factory=list)  # when pieces of the answer came, in all calls
    tries: list[Try] = field(default_factory=list)  # calls before the last one, and the last one too where it failed
    replays: int = 0  # times that the router moved the work to other hosts

    @property
    def text(self) -> bytes:
        return bytes.fromhex(self.output)

    @property
    def texts(self) -> list[bytes]:
        """The text of each call before the last one, and of the last one where it failed."""
        return [bytes.fromhex(each.output) for each in self.tries]


@dataclass(frozen=True)
class RouterHealth:
    """The hosts as the router sees them."""

    at_s: float
    # Why a host, or a link of it, cannot be used, by the host's name; `router` where that does not answer.
    problems: dict[str, str]
    sessions: int = 0  # open on all hosts
    audited: int = 0  # sweeps that were computed again since the router started
    liars: int = 0  # hosts that audits took out


Message = Answer | RouterHealth


def _answer(tries: list[dict[str, Any]], **table: Any) -> Answer:  # noqa: ANN401 - of an Answer
    return Answer(**table, tries=[Try(**each) for each in tries])


KINDS: dict[str, Callable[..., Message]] = {Answer.__name__: _answer, RouterHealth.__name__: RouterHealth}


# The parent's side


class Clients(Child):
    """A running process of clients."""

    def __init__(self, order: Order, beside: Beside) -> None:
        self.order = order
        self.answers: list[Answer] = []
        self.health: list[RouterHealth] = []
        super().__init__(beside(COMMAND), asdict(order))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def sound_since(self, moment_s: float) -> bool:
        """True when the router's last word is from after that moment, and every host and link can be used."""
        return bool(self.health) and self.health[-1].at_s > moment_s and not self.health[-1].problems

    def misses(self, host: str) -> bool:
        """True when the router's last word is that it cannot use a host."""
        return bool(self.health) and host in self.health[-1].problems

    def check_alive(self) -> None:
        """Raises ServiceError when the process has ended."""
        if self.process.poll() is not None:
            raise ServiceError(f"the clients' process ended with exit code {self.process.returncode}")

    def wait(self) -> None:
        """Wait until what is under way has ended. Raises ServiceError when the process failed."""
        try:
            code = self.process.wait(self.order.patience_s + GRACE_S)
        except subprocess.TimeoutExpired:
            raise ServiceError("the clients did not end: their requests are past every deadline") from None
        self._reader.join(GRACE_S)
        if code:
            raise ServiceError(f"the clients' process ended with exit code {code}; its words are above")

    def close(self) -> None:
        self.stop()
        self.process.kill()
        self._reader.join(GRACE_S)
        self.end(0.0)

    def _read(self) -> None:
        for line in self.lines():
            message = from_line(line, KINDS)
            if isinstance(message, Answer):
                self.answers.append(message)
            else:
                self.health.append(message)


# The process


async def run_order(order: Order) -> None:
    """Carry an order out; answers go to the standard output as they come."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    async def ask_on() -> None:
        while not stop.is_set():
            _report(await ask(client, order, next(numbers)))

    loop.add_reader(sys.stdin.fileno(), end)  # nothing more is written there: it closes
    async with AsyncClient(order.router, insecure=True) as client:
        watcher, numbers = asyncio.create_task(_watch(client)), itertools.cycle(range(len(order.cases)))
        async with asyncio.TaskGroup() as group:
            for _ in range(order.at_once):
                group.create_task(ask_on())
        await _settle(client)
        watcher.cancel()


async def ask(client: AsyncClient, order: Order, number: int) -> Answer:
    """One request, with as many calls as it takes."""
    case, begin_s = order.cases[number], time.monotonic()
    arrivals_s: list[float] = []
    tries: list[Try] = []
    output, status, replays = b"", LATE, 0
    while (left_s := begin_s + order.patience_s - time.monotonic()) > 0:
        output, called_s = b"", time.monotonic()
        try:
            async for item in _answer_to(client, case, left_s):
                if isinstance(item, bytes):
                    output += item
                    arrivals_s.append(time.monotonic())
                else:
                    replays = item.replays
            status = OK
            break
        except (RouterError, RequestRefused) as error:
            retry_ms = error.retry_after_ms if isinstance(error, RouterError) else None
            tries.append(Try(called_s, time.monotonic(), error.code.name, str(error), retry_ms, output.hex()))
            if error.code.name not in AGAIN:
                status = LATE if error.code.name == "DEADLINE_EXCEEDED" else error.code.name
                break
            await asyncio.sleep(PAUSE_S if retry_ms is None else retry_ms / 1000)
    end_s = time.monotonic()
    return Answer(number, begin_s, end_s, status, output.hex(), arrivals_s, tries, replays)


async def _answer_to(
    client: AsyncClient, case: SeededRequest, timeout_s: float
) -> AsyncIterator[bytes | Result | DrawnPictures]:
    """Pieces of the answer as they come, then its account. Pictures come in one piece."""
    if not case.draws:
        async for item in client.stream(**case.call, timeout_s=timeout_s):
            yield item
        return
    drawn = await client.draw(**case.call, timeout_s=timeout_s)
    yield drawn.pixels.tobytes()
    yield drawn


async def _watch(client: AsyncClient) -> None:
    while True:
        _report(await _health(client))
        await asyncio.sleep(HEALTH_S)


async def _health(client: AsyncClient) -> RouterHealth:
    try:
        status = await client.status(timeout_s=2.0)
    except RouterError as error:
        return RouterHealth(time.monotonic(), {"router": str(error)})
    links = {host.name: [link.problem for link in host.links if link.problem] for host in status.hosts}
    problems = {host.name: host.reason or next(iter(links[host.name]), "") for host in status.hosts}
    sessions = sum(host.sessions for host in status.hosts)
    bad = {name: problem for name, problem in problems.items() if problem}
    return RouterHealth(time.monotonic(), bad, sessions, status.audits.audited, status.audits.faulty_hosts)


async def _settle(client: AsyncClient) -> None:
    """Wait for all hosts to be there, and to have freed what requests held; report what is left."""
    deadline = time.monotonic() + SETTLE_S
    while ((health := await _health(client)).sessions or health.problems) and time.monotonic() < deadline:
        await asyncio.sleep(HEALTH_S)
    _report(health)


def _report(message: Message) -> None:
    sys.stdout.write(to_line(message))
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(run_order(Order.from_json(sys.stdin.readline())))
