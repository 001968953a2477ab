"""What audits find, and what they cost: a host that computes wrongly among honest ones, and honest ones alone."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.seeing import TextDiffers
from loadtest.table import aligned
from serving.client import Client, Result
from serving.deployment import MODULE, Deployment, temporary_deployment
from serving.modes import MODES
from serving.ports import free_port_block
from serving.topology import local_topology
from serving.v1 import router_pb2
from stages.errors import InputError, ServiceError
from stages.parts import plan_host

PROMPT = b"The old man looked at the sea and said that "
FALSE_HOST = "loadtest.false_host"
STOP_S = 10.0
READY_S = 60.0
POLL_S = 0.1
REPLICAS = 2
MOST = 100_000


@dataclass(frozen=True)
class AuditSettings:
    """What `onesweep bench audit` is told."""

    checkpoint: Path
    share: float = 0.05
    modes: tuple[str, ...] = ("sweep", "chunked", "ar")
    sweeps: int = 100
    """Within which the liar should be found."""
    rounds: int = 5
    """Routers that have to find it."""
    requests: int = 40
    """Of each mode, for the cost."""
    max_bytes: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"--share must be above 0 and at most 1, not {self.share}")
        for flag, number, least in (
            ("sweeps", self.sweeps, 1),
            ("rounds", self.rounds, 1),
            ("requests", self.requests, 2),
        ):
            if not least <= number <= MOST:
                raise InputError(f"--{flag} must be {least} to {MOST}, not {number}")
        for mode in self.modes:
            if mode not in MODES:
                raise InputError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")


@dataclass(frozen=True)
class Found:
    """One router and a liar."""

    sweeps: int
    """Of the service, until it was taken out; as many as were tried where it was not."""
    name: str
    """The liar, once it was taken out; empty where it was not."""


@dataclass(frozen=True)
class Cost:
    """A mode with and without audits, on honest hosts."""

    mode: str
    audited: int
    """Sweeps that were computed again."""
    plain_p50_ms: float
    plain_p95_ms: float
    audited_p50_ms: float
    audited_p95_ms: float
    compute_share: float
    """Arithmetic for audits over arithmetic for requests."""


@dataclass(frozen=True)
class AuditFigures:
    found: list[Found]
    costs: list[Cost]


def measure_audits(settings: AuditSettings) -> AuditFigures:
    """Both halves, one after the other. Raises OnesweepError."""
    found = [_find(settings, seed) for seed in range(settings.rounds)]
    with (
        _deployed(settings, 0.0) as plain,
        _deployed(settings, settings.share) as audited,
        Client(plain.topology.router) as first,
        Client(audited.topology.router) as second,
    ):
        costs = [cost_of(settings, mode, first, second) for mode in settings.modes]
    return AuditFigures(found, costs)


@contextmanager
def _deployed(settings: AuditSettings, share: float) -> Iterator[Deployment]:
    parts = plan_host(settings.checkpoint, (0,)).parts
    hosts = min(2, parts)
    port = free_port_block(hosts * REPLICAS + 1)
    topology = local_topology(hosts, parts, settings.checkpoint, port + 1, REPLICAS)
    with temporary_deployment(topology, settings.checkpoint, router_options=("--audit", str(share))) as deployment:
        yield deployment


def _find(settings: AuditSettings, seed: int) -> Found:
    """Sweeps until a liar in the place of the first host is taken out."""
    with _deployed(settings, settings.share) as deployment:
        name = deployment.topology.hosts[0].name
        with (
            Client(deployment.topology.router) as client,
            _false(deployment, client, name),
            ThreadPoolExecutor(REPLICAS) as threads,  # as many at once, so that every replica has work
        ):
            for number in range(0, settings.sweeps, REPLICAS):
                seeds = range(1000 * seed + number, 1000 * seed + number + REPLICAS)
                list(threads.map(lambda each: _ask(client, "sweep", 8, each), seeds))
                if is_caught(client.status().hosts, name):
                    return Found(number + REPLICAS, name)
        return Found(settings.sweeps, "")


def is_caught(hosts: Iterable[router_pb2.HostStatus], liar: str) -> bool:
    """Whether the liar was taken out. Raises ServiceError for a host that was, and is honest."""
    accused = {host.name: host.reason for host in hosts if "is taken out" in host.reason}
    for name in accused.keys() - {liar}:
        raise ServiceError(f"{name} is honest, and was accused: {accused[name]}")
    return liar in accused


def _ask(client: Client, mode: str, max_bytes: int, seed: int) -> Result:
    return client.generate(PROMPT, mode=mode, max_bytes=max_bytes, seed=seed)


@contextmanager
def _false(deployment: Deployment, client: Client, name: str) -> Iterator[None]:
    """Have a host compute wrongly."""
    deployment.kill(name)
    _await_hosts(client, "miss the one that ended", lambda hosts: not all(map(_usable, hosts)))
    command = deployment.commands[name]
    at = command.index(MODULE[-1])
    log = deployment.directory / f"{name}-false.log"
    with (
        log.open("wb") as output,
        subprocess.Popen([*command[:at], FALSE_HOST, *command[at + 1 :]], stdout=output, stderr=output) as process,
    ):
        try:
            _await_hosts(client, "are ready", lambda hosts: all(map(_usable, hosts)))
            yield
        finally:
            process.terminate()
            process.wait(STOP_S)


def _await_hosts(client: Client, what: str, holds: Callable[[list[router_pb2.HostStatus]], bool]) -> None:
    """Return when it holds of what the router says of its hosts. Raises ServiceError."""
    deadline = time.monotonic() + READY_S
    while not holds(list(client.status().hosts)):
        if time.monotonic() > deadline:
            raise ServiceError(f"after {READY_S:.0f} s the router does not say that its hosts {what}")
        time.sleep(POLL_S)


def _usable(host: router_pb2.HostStatus) -> bool:
    return host.ready and not any(link.problem for link in host.links)


def cost_of(settings: AuditSettings, mode: str, plain: Client, audited: Client) -> Cost:
    """Requests to the two deployments in turns, each first in every other one; one before them to warm up.

    Raises TextDiffers when audits change a text, ServiceError when an honest host is accused.
    """
    plain_ms: list[float] = []
    audited_ms: list[float] = []
    compute_ms = 0.0
    for client in (plain, audited):
        _ask(client, mode, settings.max_bytes, settings.requests)
    before = audited.status().audits
    for seed in range(settings.requests):
        order = (plain, audited) if seed % 2 else (audited, plain)
        results = {client: _ask(client, mode, settings.max_bytes, seed) for client in order}
        if results[plain].output != results[audited].output:
            raise TextDiffers(f"mode {mode}, seed {seed}: with audits the text is another")
        plain_ms.append(results[plain].latency_ms)
        audited_ms.append(results[audited].latency_ms)
        compute_ms += sum(host.compute_ms for host in results[audited].hosts)
    status = audited.status()
    is_caught(status.hosts, "")
    spent_ms, count = status.audits.compute_ms - before.compute_ms, status.audits.audited - before.audited
    (plain_50, plain_95), (audited_50, audited_95) = (
        (each[9], each[18]) for each in (statistics.quantiles(times, n=20) for times in (plain_ms, audited_ms))
    )
    return Cost(mode, count, plain_50, plain_95, audited_50, audited_95, spent_ms / compute_ms if compute_ms else 0.0)


def audit_table(settings: AuditSettings, figures: AuditFigures) -> str:
    """The figures for a terminal."""
    counts = ", ".join(f"{each.sweeps} ({each.name or 'not found'})" for each in figures.found)
    rows = [
        [
            cost.mode,
            str(cost.audited),
            *(f"{ms:.1f}" for ms in (cost.plain_p50_ms, cost.audited_p50_ms, cost.plain_p95_ms, cost.audited_p95_ms)),
            f"{cost.compute_share:.3f}",
        ]
        for cost in figures.costs
    ]
    head = ["mode", "audited sweeps", "p50 ms", "audited", "p95 ms", "audited", "arithmetic more"]
    missed = (1 - settings.share) ** settings.sweeps
    return "\n".join(
        [
            f"a host that computes wrongly, sweeps until it was taken out at --audit {settings.share:g}: {counts}",
            f"a run misses it in {settings.sweeps} sweeps with probability {missed:.4f}",
            "",
            aligned(head, rows),
        ]
    )


def audit_record(settings: AuditSettings, figures: AuditFigures) -> dict[str, Any]:
    """The figures for a file."""
    return {"settings": asdict(settings) | {"checkpoint": settings.checkpoint.name}} | asdict(figures)
