"""What audits find, and what they cost: a host that computes wrongly among honest ones, and honest ones alone."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.table import aligned
from serving.client import Client, Result
from serving.deployment import MODULE, Deployment, free_port_block, temporary_deployment
from serving.topology import local_topology
from stages.errors import InputError, ServiceError
from stages.parts import plan_host

PROMPT = b"The old man looked at the sea and said that "
FALSE_HOST = "loadtest.false_host"
STOP_S = 10.0
READY_S = 60.0
POLL_S = 0.1
REPLICAS = 2


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


@dataclass(frozen=True)
class Found:
    """One router and a liar."""

    sweeps: int
    """Of the service, until it was taken out; as many as were tried where it was not."""
    name: str
    """Who was taken out; empty where nobody was."""


@dataclass(frozen=True)
class Cost:
    """A mode with and without audits, on honest hosts."""

    mode: str
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
    with _deployed(settings, 0.0) as plain, _deployed(settings, settings.share) as audited:
        costs = [_cost(settings, mode, plain, audited) for mode in settings.modes]
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
                for host in client.status().hosts:
                    if "is taken out" in host.reason:
                        return Found(number + REPLICAS, host.name)
        return Found(settings.sweeps, "")


def _ask(client: Client, mode: str, max_bytes: int, seed: int) -> Result:
    return client.generate(PROMPT, mode=mode, max_bytes=max_bytes, seed=seed)


@contextmanager
def _false(deployment: Deployment, client: Client, name: str) -> Iterator[None]:
    """Have a host compute wrongly."""
    deployment.kill(name)
    command = deployment.commands[name]
    at = command.index(MODULE[-1])
    log = deployment.directory / f"{name}-false.log"
    with (
        log.open("wb") as output,
        subprocess.Popen([*command[:at], FALSE_HOST, *command[at + 1 :]], stdout=output, stderr=output) as process,
    ):
        try:
            _await_all(client)
            yield
        finally:
            process.terminate()
            process.wait(STOP_S)


def _await_all(client: Client) -> None:
    """Return when every host and link is usable. Raises ServiceError."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        hosts = client.status().hosts
        if all(host.ready and not any(link.problem for link in host.links) for host in hosts):
            return
        time.sleep(POLL_S)
    raise ServiceError(f"the hosts were not ready after {READY_S:.0f} s")


def _cost(settings: AuditSettings, mode: str, plain: Deployment, audited: Deployment) -> Cost:
    """Requests to the two deployments in turns."""
    times: dict[str, list[float]] = {"plain": [], "audited": []}
    compute_ms = 0.0
    with Client(plain.topology.router) as first, Client(audited.topology.router) as second:
        before = second.status().audits.compute_ms
        for seed in range(settings.requests):
            for name, client in (("plain", first), ("audited", second)):
                result = _ask(client, mode, settings.max_bytes, seed)
                times[name].append(result.latency_ms)
                compute_ms += sum(host.compute_ms for host in result.hosts) if name == "audited" else 0.0
        spent_ms = second.status().audits.compute_ms - before
    quantiles = [statistics.quantiles(times[name], n=20) for name in ("plain", "audited")]
    (plain_50, plain_95), (audited_50, audited_95) = ((each[9], each[18]) for each in quantiles)
    return Cost(mode, plain_50, plain_95, audited_50, audited_95, spent_ms / compute_ms)


def audit_table(settings: AuditSettings, figures: AuditFigures) -> str:
    """The figures for a terminal."""
    counts = ", ".join(f"{each.sweeps} ({each.name or 'not found'})" for each in figures.found)
    rows = [
        [
            cost.mode,
            *(f"{ms:.1f}" for ms in (cost.plain_p50_ms, cost.audited_p50_ms, cost.plain_p95_ms, cost.audited_p95_ms)),
            f"{cost.compute_share:.3f}",
        ]
        for cost in figures.costs
    ]
    head = ["mode", "p50 ms", "audited", "p95 ms", "audited", "arithmetic more"]
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
