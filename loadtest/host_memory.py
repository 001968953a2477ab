"""What the hosts of a checkpoint take at most: while they load, and with as many sessions as their budget holds."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.memory import IDLE, TARGET_RATIO, memory_of, serve_random
from loadtest.spelt import spelled, spelling_of
from loadtest.table import aligned
from serving.client import Client, RequestSettings
from serving.deployment import Deployment, temporary_deployment
from serving.ports import free_port_block
from serving.topology import HostEntry, local_topology
from stages.ar import cache_bytes
from stages.bundle import find_bundle
from stages.errors import InputError, OnesweepError
from stages.manifest import Manifest, read_manifest
from stages.parts import plan_host
from stages.transport import open_blocking_channel
from stages.v1 import stage_pb2, stage_pb2_grpc

PROMPT_CHARACTERS = 1500
SESSIONS = 2
"""At least, where the budget holds so many."""
ANSWER_S = 300.0


@dataclass(frozen=True)
class HostMemory:
    """One host, bytes over an idle server."""

    name: str
    stage: int
    """Its files."""
    budget: int
    """For KV caches."""
    caches: int
    """Of the sessions that it held; other hosts may have been full before."""
    loaded: int
    """When ready."""
    loading_peak: int
    peak: int

    @property
    def full_peak(self) -> int:
        """With all of its budget."""
        return self.peak + self.budget - self.caches

    @property
    def limit(self) -> int:
        return int(TARGET_RATIO * (self.stage + self.budget))

    @property
    def met(self) -> bool:
        return max(self.full_peak, self.loading_peak) <= self.limit


@dataclass(frozen=True)
class Filling:
    """Sessions that fill the budget of the host with most layers."""

    prompt: str
    max_tokens: int
    sessions: int


def measure_hosts(checkpoint: Path, session_mb: int) -> list[HostMemory]:
    """Every host of a deployment on this machine. Raises OnesweepError."""
    directory = find_bundle(checkpoint).ar
    if directory is None:
        raise InputError(f"{checkpoint} has no AR model: its sessions are what fills a budget")
    manifest, parts = read_manifest(directory), plan_host(checkpoint, (0,)).parts
    topology = local_topology(min(3, parts), parts, checkpoint, free_port_block(4) + 1)
    filling = _filling(directory, manifest, topology.hosts, session_mb << 20)
    idle = _idle_bytes()
    options = ("--session-mb", str(session_mb))
    with temporary_deployment(topology, checkpoint, host_options=options) as deployment:
        ready = {host.name: memory_of(deployment.processes[host.name]) for host in topology.hosts}
        held = _fill(deployment, filling)
        after = {host.name: memory_of(deployment.processes[host.name]) for host in topology.hosts}
    return [
        HostMemory(
            host.name,
            _stage_bytes(checkpoint, host),
            session_mb << 20,
            held[host.name],
            ready[host.name].rss - idle,
            ready[host.name].peak - idle,
            after[host.name].peak - idle,
        )
        for host in topology.hosts
    ]


def hosts_table(hosts: list[HostMemory]) -> str:
    """For a terminal, MB."""
    limit = f"{TARGET_RATIO} (stage + budget)"
    header = ("host", "stage", "KV budget", "held", "ready", "peak, loading", "peak", "budget full", limit, "met")
    rows = []
    for host in hosts:
        sizes = (host.stage, host.budget, host.caches, host.loaded, host.loading_peak, host.peak, host.full_peak)
        figures = [f"{size / 1e6:.1f}" for size in (*sizes, host.limit)]
        rows.append((host.name, *figures, "yes" if host.met else "no"))
    return aligned(header, rows) + "\nMB, over an idle server"


def hosts_record(hosts: list[HostMemory]) -> dict[str, Any]:
    """Figures for a JSON file."""
    return {"bench": "memory", "hosts": [{**asdict(host), "limit": host.limit, "met": host.met} for host in hosts]}


def _filling(directory: Path, manifest: Manifest, hosts: tuple[HostEntry, ...], budget: int) -> Filling:
    from pydoc_data.topics import topics

    a = manifest.architecture
    per_position = max(cache_bytes(sum(map(a.layers_in, host.blocks)), a, 1) for host in hosts)
    capacity = min(a.positions - 1, budget // (SESSIONS * per_position))
    prompt = "\n".join(topics.values())[: min(PROMPT_CHARACTERS, capacity // 2)]
    room = capacity - len(spelled(spelling_of(directory), prompt.encode()))
    if room < 2:
        raise InputError("--session-mb is too small for two sessions of a few positions: give more")
    return Filling(prompt, room, budget // (capacity * per_position))


def _idle_bytes() -> int:
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        return serve_random(Path(folder), IDLE)[0].rss


def _fill(deployment: Deployment, filling: Filling) -> dict[str, int]:
    """Open all sessions, and let them write until all are open. Returns the bytes of caches that each host held."""
    opened, enough = threading.Semaphore(0), threading.Event()
    failures: list[OnesweepError] = []

    def write(seed: int) -> None:
        try:
            with Client(deployment.topology.router) as client:
                settings: RequestSettings = {"mode": "ar", "max_tokens": filling.max_tokens, "seed": seed}
                for _ in client.stream(filling.prompt, timeout_s=2 * ANSWER_S, **settings):
                    opened.release()
                    enough.wait(ANSWER_S)
                    return  # which frees the session
        except OnesweepError as error:
            failures.append(error)
            opened.release()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(filling.sessions)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            if not opened.acquire(timeout=ANSWER_S):
                raise OnesweepError(f"a session was not open after {ANSWER_S:.0f} s")
            for failure in failures:
                raise failure
        return {host.name: _session_bytes_of(host) for host in deployment.topology.hosts}
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def _session_bytes_of(host: HostEntry) -> int:
    with open_blocking_channel(host.address) as channel:
        described = stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=ANSWER_S)
    return int(described.counters.session_bytes)


def _stage_bytes(checkpoint: Path, host: HostEntry) -> int:
    plan = plan_host(checkpoint, host.blocks)
    parts = [source.manifest.parts[block] for source in plan.models.values() for block in plan.blocks]
    return sum(part.bytes for part in parts if part is not None)
