"""Rows of `bench host` on a ring over loopback: a sweep and a byte on top of the model, batching, idle servers."""

import asyncio
import statistics
import time
from dataclasses import dataclass

import psutil
import torch

from onesweep.loadtest.commands import Row, say
from onesweep.loadtest.host.bare import PROMPT, Output, PictureRequests, TextRequests, bare_rate
from onesweep.loadtest.host.commands import HostBenchSettings
from onesweep.loadtest.workload.pipeline import InProcess, Work
from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import AsyncClient, Client
from onesweep.serving.router.topology import local_topology
from onesweep.stages.checkpoint.bundle import bundle_draws
from onesweep.stages.errors import OnesweepError
from onesweep.stages.host.parts import plan_host
from onesweep.stages.signals import run_interruptible

RING = 3
# Most milliseconds a sweep on top of the model, for a ring of three; a byte is a sweep of `ar`.
TARGETS_MS = {"sweep": 8.0, "chunked": 8.0, "ar": 2.5}
IDLE_PERCENT = 0.5  # of a core: a host that waits for work must not cost its owner anything
SETTLE_S = 15.0  # between the last request and the measurement of idle servers


class TextDiffers(OnesweepError):
    """Two ways that must give the same text do not: nothing that is measured then means anything."""


@dataclass(frozen=True)
class RequestTiming:
    """One request, served and computed here; milliseconds."""

    latency_ms: float  # at the client, from the call to the end of the account
    compute_ms: float  # the hosts' own figure
    in_process_ms: float
    sweeps: int


def measure_ring(settings: HostBenchSettings) -> list[Row]:
    """Rows of every mode that the bundle has weights for. Raises OnesweepError."""
    parts = plan_host(settings.checkpoint, (0,)).parts
    hosts = min(RING, parts) if settings.hosts is None else settings.hosts
    ring = local_topology(hosts, parts, settings.checkpoint, free_port_block(hosts + 1) + 1)
    subject = (PictureRequests if bundle_draws(settings.checkpoint) else TextRequests)(settings)
    all_cores = torch.get_num_threads()
    say(f"{hosts} hosts on loopback; keep the machine idle ...")
    with temporary_deployment(ring, settings.checkpoint) as deployment:
        rows = _overhead_rows(ring.router, subject, hosts) if isinstance(subject, TextRequests) else []
        served = {mode: run_interruptible(_served(ring.router, mode, subject)) for mode in subject.models}
        idle = _idle_rows(deployment, settings.idle_s) if settings.idle_s else []
    # after the hosts have gone: they would share the cores
    for mode, (alone, together) in served.items():
        # on a busy machine two threads of one loop wait for each other, and it is slower than one alone
        bare = max(bare_rate(subject, mode, threads) for threads in (1, all_cores))
        rows += [
            Row(f"{mode}: one request after the other", alone, subject.unit),
            Row(f"{mode}: {settings.batch} requests at once", together, subject.unit),
            Row(f"{mode}: bare torch loop over {settings.batch}", bare, subject.unit),
            Row(f"{mode}: at once over the bare loop", together / bare, "x"),
        ]
    return rows + idle


def _overhead_rows(router: str, subject: TextRequests, hosts: int) -> list[Row]:
    """Requests one at a time, interleaved: a slow moment of the machine falls on every mode. Raises TextDiffers."""
    s = subject.settings
    modes = [mode for mode in TARGETS_MS if ("ar" if mode == "ar" else "sweep") in subject.models]
    samples: dict[str, list[RequestTiming]] = {mode: [] for mode in modes}
    torch.set_num_threads(1)  # as the hosts
    floor = InProcess(s.checkpoint)
    with Client(router) as client:
        for mode in modes:  # connections open and kernels load
            _sample(client, floor, Work(mode, PROMPT, s.max_tokens, 0))
        for i in range(s.requests):
            turn = i % len(modes)
            for mode in modes[turn:] + modes[:turn]:
                samples[mode].append(_sample(client, floor, Work(mode, PROMPT, s.max_tokens, i)))
    return [row for mode in modes for row in overhead_rows(mode, hosts, samples[mode])]


def _sample(client: Client, floor: InProcess, work: Work) -> RequestTiming:
    begin = time.perf_counter()
    result = client.generate(work.prompt, mode=work.mode, max_bytes=work.max_bytes, seed=work.seed)
    middle = time.perf_counter()
    text = floor.generate(work)
    end = time.perf_counter()
    check_text(work, result.output, text)
    return RequestTiming((middle - begin) * 1000, result.compute_ms, (end - middle) * 1000, result.sweeps)


def check_text(work: Work, served: bytes, text: bytes) -> None:
    """Raises TextDiffers, with both texts, unless what was served is what the model gives here."""
    if served != text:
        raise TextDiffers(
            f"mode {work.mode}, seed {work.seed}: serving changed the text\n"
            f"  served:     {served!r}\n  in process: {text!r}"
        )


def overhead_rows(mode: str, hosts: int, samples: list[RequestTiming]) -> list[Row]:
    """Medians over the requests of one mode."""
    median = statistics.median
    overhead = median((s.latency_ms - s.compute_ms) / s.sweeps for s in samples)
    unit = "byte" if mode == "ar" else "sweep"
    return [
        Row(f"{mode}: latency", median(s.latency_ms for s in samples), "ms"),
        Row(f"{mode}: the model in one process", median(s.in_process_ms for s in samples), "ms"),
        Row(f"{mode}: latency over compute", median(s.latency_ms / s.compute_ms for s in samples), "x"),
        Row(f"{mode}: a {unit} on top of the model", overhead, "ms", TARGETS_MS[mode] if hosts == RING else None),
    ]


async def _served(router: str, mode: str, subject: TextRequests | PictureRequests) -> tuple[float, float]:
    """Tokens or pictures a second, alone and together. Raises TextDiffers when a result depends on its company."""
    batch, alone, together = subject.settings.batch, list[float](), list[float]()
    async with AsyncClient(router) as client:
        expected = [await subject.ask(client, mode, seed) for seed in range(batch)]
        for turn in range(subject.settings.rounds):
            begin = time.perf_counter()
            one = await subject.ask(client, mode, turn % batch)
            middle = time.perf_counter()
            results: list[Output] = await asyncio.gather(*(subject.ask(client, mode, seed) for seed in range(batch)))
            end = time.perf_counter()
            if results != expected:
                raise TextDiffers(f"mode {mode}: a result depends on what is asked for beside it")
            alone.append(one.units / (middle - begin))
            together.append(sum(each.units for each in results) / (end - middle))
    return statistics.median(alone), statistics.median(together)


def _idle_rows(deployment: Deployment, seconds: float) -> list[Row]:
    """Processor time of the servers of a ring that has just worked and waits now."""
    time.sleep(SETTLE_S)
    processes = {name: psutil.Process(pid) for name, pid in deployment.processes.items()}
    before = {name: _processor_s(process) for name, process in processes.items()}
    time.sleep(seconds)
    shares = {name: 100 * (_processor_s(process) - before[name]) / seconds for name, process in processes.items()}
    return [Row(f"idle: {name}", share, "% of a core", IDLE_PERCENT) for name, share in shares.items()]


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
