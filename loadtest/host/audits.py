"""The benchmark `audit`: sweeps until a host that computes wrongly is found, and the cost of audits on honest hosts."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from onesweep.loadtest.faults.base import check_names
from onesweep.loadtest.faults.serving_testbed import impostor_of
from onesweep.loadtest.host.benchmark import PROMPT, Benchmark, TextDiffers, check_modes, ring_of
from onesweep.loadtest.host.settings import AuditSettings
from onesweep.loadtest.report.table import aligned
from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.client.client import Client, DrawnPictures, Result, RouterError
from onesweep.serving.v1 import router_pb2
from onesweep.stages.checkpoint.bundle import bundle_draws
from onesweep.stages.errors import ServiceError
from onesweep.stages.host.parts import plan_host

STOP_S = 10.0  # within which a faulty host must end
READY_S = 60.0
POLL_S = 0.1
SETTLED_S = 1.0  # without a further audit: then all have ended
REPLICAS = 2
WRITTEN, DRAWN = ("sweep", "chunked", "ar", "ar-speculative", "resample"), ("chain", "steps")
MOST_SEARCHED = 10  # times --sweeps: then it was not found
SHORT_BYTES = 8  # of a text that is written in one sweep, where a faulty host is searched for


@dataclass(frozen=True)
class CatchResult:
    """One router that searches for one faulty host."""

    sweeps: int  # until the faulty host was taken out, or all that were tried
    name: str  # the host that was taken out; empty if none was


@dataclass(frozen=True)
class AuditCost:
    """A mode with and without audits, on honest hosts."""

    mode: str
    audited: int  # sweeps that were computed again
    plain_p50_ms: float
    plain_p95_ms: float
    audited_p50_ms: float
    audited_p95_ms: float
    compute_share: float  # arithmetic for audits over arithmetic for requests
    sweep_cost: float  # arithmetic to audit a sweep over that of a sweep


@dataclass(frozen=True)
class AuditFigures:
    found: list[CatchResult]
    costs: list[AuditCost]


class AuditBench(Benchmark[AuditSettings, AuditFigures]):
    """`onesweep bench audit`: faulty hosts that have to be found, then honest ones for the cost."""

    @property
    def announcement(self) -> str:
        s = self.settings
        return f"{s.rounds} routers look for a faulty host, then {s.requests} requests of each mode ..."

    @property
    def modes(self) -> tuple[str, ...]:
        usual = DRAWN if bundle_draws(self.settings.checkpoint) else WRITTEN
        return usual if self.settings.modes is None else self.settings.modes

    def check(self) -> None:
        if bundle_draws(self.settings.checkpoint):
            check_names("--modes", self.modes, DRAWN)
        else:
            check_modes(self.modes)

    def measure(self) -> AuditFigures:
        s = self.settings
        found = [_find(s, self.modes[0], seed) for seed in range(s.rounds)]
        with (
            _deployed(s, 0.0) as plain,
            _deployed(s, s.share) as audited,
            Client(plain.topology.router) as first,
            Client(audited.topology.router) as second,
        ):
            return AuditFigures(found, [cost_of(s, mode, first, second) for mode in self.modes])

    def table(self, result: AuditFigures) -> str:
        s = self.settings
        took = sorted(each.sweeps if each.name else math.inf for each in result.found)
        p50, p90 = (took[math.ceil(part * len(took)) - 1] for part in (0.5, 0.9))
        counts = ", ".join(f"{each.sweeps} ({each.name or 'not found'})" for each in result.found)
        head = [
            "mode",
            "audited sweeps",
            "p50 ms",
            "audited",
            "p95 ms",
            "audited",
            "arithmetic more",
            "of an audited sweep",
        ]
        rows = [
            [
                *(cost.mode, str(cost.audited), f"{cost.plain_p50_ms:.1f}", f"{cost.audited_p50_ms:.1f}"),
                *(
                    f"{cost.plain_p95_ms:.1f}",
                    f"{cost.audited_p95_ms:.1f}",
                    f"{cost.compute_share:.3f}",
                    f"{cost.sweep_cost:.2f}",
                ),
            ]
            for cost in result.costs
        ]
        return (
            f"a host that computes wrongly in {s.rate:.0%} of its sweeps, sweeps of {self.modes[0]} until it was taken "
            f"out at --audit {s.share:g}: {counts}\n"
            f"p50 {p50:g}, p90 {p90:g}, most {took[-1]:g}; found in {s.sweeps} sweeps or fewer: "
            f"{sum(each <= s.sweeps for each in took)} of {len(took)}\n"
            f"of {s.sweeps} audited one by one, none is a wrong one with probability "
            f"{(1 - s.share * s.rate) ** s.sweeps:.4f}\n\n" + aligned(head, rows)
        )

    def record(self, result: AuditFigures) -> dict[str, Any]:
        return {"settings": asdict(self.settings) | {"checkpoint": self.settings.checkpoint.name}} | asdict(result)


def _deployed(settings: AuditSettings, share: float) -> AbstractContextManager[Deployment]:
    # an audit needs another host with the same blocks, so every part is on two
    ring = ring_of(settings.checkpoint, min(2, plan_host(settings.checkpoint, (0,)).parts), REPLICAS)
    return temporary_deployment(ring, settings.checkpoint, router_options=("--audit", str(share)))


def _find(settings: AuditSettings, mode: str, seed: int) -> CatchResult:
    """Sweeps until a faulty host in the place of the first one is taken out."""
    size = SHORT_BYTES if mode == "sweep" else settings.max_bytes

    def ask(client: Client, seed: int) -> int:
        try:
            return _ask(client, mode, size, seed).sweeps
        except RouterError as error:  # the text so far was wrong, or each try was
            if error.code not in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE):
                raise
            return 1 if mode == "sweep" or mode in DRAWN else size

    with _deployed(settings, settings.share) as deployment:
        name, sweeps = deployment.topology.hosts[0].name, 0
        with (
            Client(deployment.topology.router) as client,
            _false(deployment, client, name, f"wrong:{settings.rate}:{seed}"),
            ThreadPoolExecutor(REPLICAS) as threads,  # as many at once, so that every replica has work
        ):
            # sweeps are counted by what was sent: verdicts come later, and the sweeps meanwhile count against audits
            for number in itertools.count(1000 * seed, REPLICAS):
                sweeps += sum(threads.map(ask, [client] * REPLICAS, range(number, number + REPLICAS)))
                if is_caught(client.status().hosts, name):
                    return CatchResult(sweeps, name)
                if sweeps >= MOST_SEARCHED * settings.sweeps:
                    return CatchResult(sweeps, "")
    raise AssertionError


def is_caught(hosts: Iterable[router_pb2.HostStatus], liar: str) -> bool:
    """True when the faulty host was taken out. Raises ServiceError when an honest one was."""
    accused = {host.name: host.reason for host in hosts if "is quarantined" in host.reason}
    for name in accused.keys() - {liar}:
        raise ServiceError(f"{name} is honest, and was accused: {accused[name]}")
    return liar in accused


def _ask(client: Client, mode: str, max_bytes: int, seed: int) -> Result | DrawnPictures:
    if mode in DRAWN:
        return client.draw("0", mode=mode, seed=seed)
    return client.generate(PROMPT, mode=mode, max_bytes=max_bytes, seed=seed)


def _content(answer: Result | DrawnPictures) -> bytes:
    return answer.pixels.tobytes() if isinstance(answer, DrawnPictures) else answer.output


@contextmanager
def _false(deployment: Deployment, client: Client, name: str, kind: str) -> Iterator[None]:
    """A deployment in which one host computes wrongly."""
    deployment.kill(name)
    _await_hosts(client, "miss the one that ended", lambda hosts: not all(map(_usable, hosts)))
    host = impostor_of(deployment, name, kind)
    host.start()
    try:
        _await_hosts(client, "are ready", lambda hosts: all(map(_usable, hosts)))
        yield
    finally:
        host.stop(STOP_S)


def _await_hosts(client: Client, what: str, holds: Callable[[list[router_pb2.HostStatus]], bool]) -> None:
    """Return when `holds` is true of the hosts' status. Raises ServiceError after READY_S."""
    deadline = time.monotonic() + READY_S
    while not holds(list(client.status().hosts)):
        if time.monotonic() > deadline:
            raise ServiceError(f"after {READY_S:.0f} s the router does not say that its hosts {what}")
        time.sleep(POLL_S)


def _usable(host: router_pb2.HostStatus) -> bool:
    return host.ready and not any(link.problem for link in host.links)


def cost_of(settings: AuditSettings, mode: str, plain: Client, audited: Client) -> AuditCost:
    """Requests to the two deployments in turns, each first in every other one; one before them to warm up.

    Raises TextDiffers when audits change an answer, ServiceError when an honest host is accused.
    """
    plain_ms: list[float] = []
    audited_ms: list[float] = []
    compute_ms = 0.0
    for client in (plain, audited):
        _ask(client, mode, settings.max_bytes, settings.requests)
    before = audited.status().audits
    for seed in range(settings.requests):
        # whichever is second finds the processor's caches and clock as the first left them
        order = (plain, audited) if seed % 2 else (audited, plain)
        results = {client: _ask(client, mode, settings.max_bytes, seed) for client in order}
        if _content(results[plain]) != _content(results[audited]):
            raise TextDiffers(f"mode {mode}, seed {seed}: with audits the answer is another")
        plain_ms.append(results[plain].latency_ms)
        audited_ms.append(results[audited].latency_ms)
        compute_ms += sum(host.compute_ms for host in results[audited].hosts)
    status, seen = audited.status(), before
    while status.audits != seen:  # audits end after their answers
        time.sleep(SETTLED_S)
        status, seen = audited.status(), status.audits
    is_caught(status.hosts, "")
    spent_ms, count = status.audits.compute_ms - before.compute_ms, status.audits.audited - before.audited
    share, sweeps = spent_ms / compute_ms if compute_ms else 0.0, status.audits.sweeps - before.sweeps
    (plain_50, plain_95), (audited_50, audited_95) = (
        (each[9], each[18]) for each in (statistics.quantiles(times, n=20) for times in (plain_ms, audited_ms))
    )
    cost = share * sweeps / count if count else 0.0
    return AuditCost(mode, count, plain_50, plain_95, audited_50, audited_95, share, cost)
