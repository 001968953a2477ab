"""The clients' process: `python -m loadtest.chaos.crowd`, an Order on its standard input.

It asks until its standard input closes, then lets what is under way end. What a client does that wants its text: it
waits where it is told to, calls again where the router or the connection is gone, and gives up when its patience ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.chaos.answer import LATE, OK, Answer, Health, Message, Try, to_line
from loadtest.chaos.cases import Case
from serving.client import AsyncClient, RequestRefused, Result, RouterError

PAUSE_S = 0.25
"""Before another call, where nobody said when."""
HEALTH_S = 0.5
SETTLE_S = 60.0
"""How long after the last answer hosts may be lost, or hold sessions."""
AGAIN = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "ABORTED"}
"""Statuses after which the same request may be sent again."""


@dataclass(frozen=True)
class Order:
    """What to ask for."""

    router: str
    cases: tuple[Case, ...]
    at_once: int
    patience_s: float
    once: bool = False
    """Each case once, and no more."""
    health: bool = False
    """Whether to tell what the router says of its hosts."""
    first: bool = True

    @property
    def turns(self) -> int:
        """Requests that one client may still have to make after the standard input closes."""
        return math.ceil(len(self.cases) / self.at_once) if self.once else 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        table: dict[str, Any] = json.loads(text)
        return cls(**{**table, "cases": tuple(Case.from_record(case) for case in table["cases"])})


def main() -> None:
    order = Order.from_json(sys.stdin.readline())
    asyncio.run(run_order(order))


async def run_order(order: Order) -> None:
    """Carry an order out; answers go to the standard output as they come."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    loop.add_reader(sys.stdin.fileno(), end)  # nothing more is written there: it closes
    async with AsyncClient(order.router, insecure=True) as client:
        watcher = asyncio.create_task(_watch(client)) if order.health else None
        numbers = iter(range(len(order.cases))) if order.once else itertools.cycle(range(len(order.cases)))
        async with asyncio.TaskGroup() as group:
            for _ in range(order.at_once):
                group.create_task(_ask_on(client, order, numbers, stop))
        if watcher is not None:
            await _settle(client)
            watcher.cancel()


async def _ask_on(client: AsyncClient, order: Order, numbers: Any, stop: asyncio.Event) -> None:  # noqa: ANN401
    for number in numbers:
        if stop.is_set():
            return
        _tell(await ask(client, order, number))


async def ask(client: AsyncClient, order: Order, number: int) -> Answer:
    """One request, with as many calls as it takes."""
    case, begin_s = order.cases[number], time.monotonic()
    arrivals_s: list[float] = []
    tries: list[Try] = []
    output, status, result = b"", LATE, None
    while (left_s := begin_s + order.patience_s - time.monotonic()) > 0:
        output, called_s = b"", time.monotonic()
        try:
            stream = client.stream(case.prompt, mode=case.mode, seed=case.seed, timeout_s=left_s, **case.settings)
            async for item in stream:
                if isinstance(item, Result):
                    result = item
                else:
                    output += item
                    arrivals_s.append(time.monotonic())
            status = OK
            break
        except (RouterError, RequestRefused) as error:
            retry_ms = error.retry_after_ms if isinstance(error, RouterError) else None
            tries.append(Try(called_s, time.monotonic(), error.code.name, str(error), retry_ms, output.hex()))
            if error.code.name not in AGAIN:
                status = LATE if error.code.name == "DEADLINE_EXCEEDED" else error.code.name
                break
            await asyncio.sleep(PAUSE_S if retry_ms is None else retry_ms / 1000)
    return Answer(
        number,
        begin_s,
        time.monotonic(),
        status,
        output.hex(),
        arrivals_s,
        tries,
        result.replays if result else 0,
        order.first,
    )


async def _watch(client: AsyncClient) -> None:
    while True:
        _tell(await _health(client))
        await asyncio.sleep(HEALTH_S)


async def _health(client: AsyncClient) -> Health:
    try:
        status = await client.status(timeout_s=2.0)
    except RouterError as error:
        return Health(time.monotonic(), {"router": str(error)})
    links = {host.name: [link.problem for link in host.links if link.problem] for host in status.hosts}
    problems = {host.name: host.reason or next(iter(links[host.name]), "") for host in status.hosts}
    sessions = sum(host.sessions for host in status.hosts)
    bad = {name: problem for name, problem in problems.items() if problem}
    modes, audits = list(status.modes), status.audits
    return Health(time.monotonic(), bad, sessions, modes, status.context_tokens, audits.audited, audits.liars)


async def _settle(client: AsyncClient) -> None:
    """Wait for all hosts to be there, and to have freed what requests held; tell what is left."""
    deadline = time.monotonic() + SETTLE_S
    while ((health := await _health(client)).sessions or health.problems) and time.monotonic() < deadline:
        await asyncio.sleep(HEALTH_S)
    _tell(health)


def _tell(message: Message) -> None:
    sys.stdout.write(to_line(message))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
