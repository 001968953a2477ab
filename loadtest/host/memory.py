"""The benchmark `memory`: a loaded block over an idle server, or hosts that are full of sessions."""

from __future__ import annotations

import math
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from onesweep.loadtest.host.benchmark import PROMPT, Benchmark, ring_of
from onesweep.loadtest.host.settings import MemorySettings
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.testbed import NO_MEMORY
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.client.client import Client
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.serving.router.topology import HostEntry
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.checkpoint import save_block, write_manifest
from onesweep.stages.checkpoint.gate import PROBE_TEXT
from onesweep.stages.checkpoint.manifest import Manifest, read_manifest
from onesweep.stages.errors import InputError, OnesweepError
from onesweep.stages.host.parts import plan_host
from onesweep.stages.model.architecture import VOCABULARY, Architecture
from onesweep.stages.model.block import Block, Codes
from onesweep.stages.model.partition import equal_probability
from onesweep.stages.model.pipeline import cache_bytes
from onesweep.stages.v1 import stage_pb2, stage_pb2_grpc
from onesweep.stages.wire.channel import open_blocking_channel

CODE_SEED = 0
SIGMA_MIN, SIGMA_MAX = 0.15, 10.0
LAYERS = 4
HEADS = 8
WIDTH_STEP = 2 * HEADS


def write_random_chain(directory: Path, architecture: Architecture, seed: int = 0) -> None:
    """A chain checkpoint of `own` blocks, made one block at a time. Raises CheckpointError."""
    codes = Codes(CODE_SEED, architecture.code_dim)
    partition = equal_probability(architecture.parts, SIGMA_MIN, SIGMA_MAX)
    nothing = (None,) * architecture.parts
    write_manifest(directory, Manifest("chain", architecture, nothing, codes, partition, probe_text=PROBE_TEXT))
    # one block in memory at a time: a chain may be larger than this machine's memory
    for index in range(architecture.parts):
        torch.manual_seed(seed + index)
        save_block(directory, Block(architecture, index, codes).eval())


def block_bytes(directory: Path, index: int = 0) -> int:
    """Size of a block's weights, as its file holds them."""
    part = read_manifest(directory).parts[index]
    assert part is not None
    return part.bytes


def sized_architecture(block_mb: int) -> Architecture:
    """One block of about `block_mb` million bytes."""
    one = Architecture(parts=1, layers=LAYERS, heads=HEADS)
    # numbers in a block: quadratic * width^2 + linear * width; norms and biases are left out
    quadratic = 12 * LAYERS
    linear = 6 * LAYERS * one.condition_dim + 3 * VOCABULARY + 2 * one.code_dim
    width = (math.sqrt(linear**2 + 4 * quadratic * block_mb * 1e6 / 4) - linear) / (2 * quadratic)
    return replace(one, width=max(round(width / WIDTH_STEP), 1) * WIDTH_STEP)


TARGET_RATIO = 1.3  # most bytes of memory for a byte of weights, after loading and warming up
HOST_RATIO = 1.15  # most bytes of memory for a byte of stage and KV budget, while loading, too
IDLE = Architecture(parts=1, layers=1, width=16, heads=2, code_dim=4, condition_dim=4)
REQUEST_BYTES = 256
REQUESTS = 3
MEASURES = ("rss", "pss", "uss", "peak")


@dataclass(frozen=True)
class ServerMemory:
    """One stage server, bytes. Resident, proportional (shared pages divided), unique; and the peak so far."""

    rss: int
    pss: int
    uss: int
    peak: int


@dataclass(frozen=True)
class MemoryFigures:
    """An idle server against one with a block: when ready (loaded and warmed up), and after requests."""

    block_bytes: int
    width: int
    idle: ServerMemory
    loaded: ServerMemory
    idle_after: ServerMemory
    loaded_after: ServerMemory

    def ratio(self, measure: str, after: bool = False) -> float:
        """(loaded - idle) / block bytes."""
        pair = (self.loaded_after, self.idle_after) if after else (self.loaded, self.idle)
        return float(getattr(pair[0], measure) - getattr(pair[1], measure)) / self.block_bytes

    @property
    def met(self) -> bool:
        return self.ratio("rss") <= TARGET_RATIO


class MemoryBench(Benchmark[MemorySettings, "MemoryFigures | list[HostMemory]"]):
    """`onesweep bench memory`: with a checkpoint its hosts, full of sessions; else one random block."""

    @property
    def announcement(self) -> str:
        if self.settings.checkpoint is not None:
            return f"starting hosts for sessions of {self.settings.session_mb} MB ..."
        return f"writing a block of about {self.settings.block_mb} MB, starting two servers ..."

    def measure(self) -> MemoryFigures | list[HostMemory]:
        if self.settings.checkpoint is not None:
            return measure_hosts(self.settings.checkpoint, self.settings.session_mb)
        return measure_block(self.settings.block_mb)

    def table(self, result: MemoryFigures | list[HostMemory]) -> str:
        return hosts_table(result) if isinstance(result, list) else block_table(result)

    def record(self, result: MemoryFigures | list[HostMemory]) -> dict[str, Any]:
        if isinstance(result, list):
            hosts = [{**asdict(host), "limit": host.limit, "met": host.met} for host in result]
            return {"bench": "memory", "hosts": hosts}
        ratios = {
            when: {measure: result.ratio(measure, after) for measure in MEASURES}
            for when, after in (("ready", False), ("after_requests", True))
        }
        return {"bench": "memory", **asdict(result), "ratios": ratios, "target_ratio": TARGET_RATIO, "met": result.met}


def measure_block(block_mb: int) -> MemoryFigures:
    """An idle server and one with a block, one after the other. Raises OnesweepError."""
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        architecture = sized_architecture(block_mb)
        # the idle server is a real one with a tiny block: Python, torch and gRPC are in both
        idle, idle_after = serve_random(small, IDLE)
        loaded, loaded_after = serve_random(large, architecture)
        return MemoryFigures(block_bytes(large), architecture.width, idle, loaded, idle_after, loaded_after)


def block_table(figures: MemoryFigures) -> str:
    rows = []
    for name, idle, loaded, after in (
        ("ready", figures.idle, figures.loaded, False),
        (f"after {REQUESTS} requests", figures.idle_after, figures.loaded_after, True),
    ):
        for measure in MEASURES:
            sizes = (f"{getattr(server, measure) / 1e6:.1f}" for server in (idle, loaded))
            rows.append((f"{measure}, {name}", *sizes, f"{figures.ratio(measure, after):.2f}"))
    return "\n".join(
        [
            f"block of {figures.block_bytes / 1e6:.1f} MB (width {figures.width})",
            aligned(("measure", "idle MB", "loaded MB", "(loaded - idle) / block"), rows),
            f"rss when ready at most {TARGET_RATIO} of the block: {'yes' if figures.met else 'no'}",
        ]
    )


def serve_random(checkpoint: Path, architecture: Architecture) -> tuple[ServerMemory, ServerMemory]:
    """Serve one random block, which is written to `checkpoint`: its server's memory when ready, and after requests."""
    write_random_chain(checkpoint, architecture)
    ring = ring_of(checkpoint, 1)
    with temporary_deployment(ring, checkpoint) as deployment:
        pid = deployment.processes[ring.hosts[0].name]  # not the router, which loads no block
        ready = memory_of(pid)
        with Client(ring.router) as client:
            for seed in range(REQUESTS):
                client.generate(PROMPT, mode="sweep", max_bytes=REQUEST_BYTES, seed=seed)
        return ready, memory_of(pid)


def memory_of(pid: int) -> ServerMemory:
    """A stage server's memory now. Raises OnesweepError where it cannot be read."""
    try:
        info = psutil.Process(pid).memory_full_info()
        return ServerMemory(info.rss, info.pss, info.uss, _peak(pid))
    except (psutil.Error, OSError, AttributeError) as error:
        raise OnesweepError(f"cannot read the memory of a stage server ({error!r}): this bench needs Linux") from None


def _peak(pid: int) -> int:
    """VmHWM: the most that was ever resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


PROMPT_CHARACTERS = 1500  # read in pieces, as a long prompt is, so that its buffers are in the peak
SESSIONS = 2  # at least, where the budget holds so many
ANSWER_S = 300.0


@dataclass(frozen=True)
class HostMemory:
    """One host, bytes over an idle server."""

    name: str
    stage: int  # its files
    budget: int  # for KV caches
    caches: int  # of the sessions that it held; other hosts may have been full before
    loaded: int  # when ready
    loading_peak: int
    peak: int

    @property
    def full_peak(self) -> int:
        """With all of its budget."""
        return self.peak + self.budget - self.caches

    @property
    def limit(self) -> int:
        return int(HOST_RATIO * (self.stage + self.budget))

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
    directory, budget = find_bundle(checkpoint).ar, session_mb << 20
    if directory is None:
        raise InputError(f"{checkpoint} has no AR model: its sessions are what fills a budget")
    ring = ring_of(checkpoint)
    filling = _filling(directory, read_manifest(directory), ring.hosts, budget)
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        idle = serve_random(Path(folder), IDLE)[0].rss
    options = ("--session-mb", str(session_mb), *NO_MEMORY)
    with temporary_deployment(ring, checkpoint, host_options=options) as deployment:
        ready = {name: memory_of(pid) for name, pid in deployment.processes.items()}
        held = _fill(deployment, filling)
        after = {name: memory_of(pid) for name, pid in deployment.processes.items()}
    names = {host.name: host for host in ring.hosts}
    return [
        HostMemory(
            name,
            _stage_bytes(checkpoint, host),
            budget,
            held[name],
            loaded=ready[name].rss - idle,
            loading_peak=ready[name].peak - idle,
            peak=after[name].peak - idle,
        )
        for name, host in names.items()
    ]


def hosts_table(hosts: list[HostMemory]) -> str:
    """For a terminal, MB."""
    limit = f"{HOST_RATIO} (stage + budget)"
    header = ("host", "stage", "KV budget", "held", "ready", "peak, loading", "peak", "budget full", limit, "met")
    rows = []
    for host in hosts:
        sizes = (host.stage, host.budget, host.caches, host.loaded, host.loading_peak, host.peak, host.full_peak)
        figures = [f"{size / 1e6:.1f}" for size in (*sizes, host.limit)]
        rows.append((host.name, *figures, "yes" if host.met else "no"))
    return aligned(header, rows) + "\nMB, over an idle server"


def _filling(directory: Path, manifest: Manifest, hosts: tuple[HostEntry, ...], budget: int) -> Filling:
    from pydoc_data.topics import topics

    a = manifest.text_architecture
    per_position = max(cache_bytes(sum(map(a.layers_in, host.blocks)), a, 1) for host in hosts)
    capacity = min(a.positions - 1, budget // (SESSIONS * per_position))
    prompt = "\n".join(topics.values())[: min(PROMPT_CHARACTERS, capacity // 2)]
    room = capacity - len(symbols_of(tokenizer_of(directory), prompt.encode()))
    if room < 2:
        raise InputError("--session-mb is too small for two sessions of a few positions: give more")
    return Filling(prompt, room, budget // (capacity * per_position))


def _fill(deployment: Deployment, filling: Filling) -> dict[str, int]:
    """Open all sessions, and let them write until all are open. Returns the bytes of caches that each host held."""
    opened, enough = threading.Semaphore(0), threading.Event()
    failures: list[OnesweepError] = []

    def write(seed: int) -> None:
        try:
            with Client(deployment.topology.router) as client:
                settings: dict[str, Any] = {"mode": "ar", "max_tokens": filling.max_tokens, "seed": seed}
                # the first piece of text: every host of the way holds the session's cache by then
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
