"""What being watched costs: deployments without and with metrics, traces and JSON logs, in turns on one machine."""

from __future__ import annotations

import asyncio
import math
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from loadtest.quality.intervals import Estimate, percentiles, resampled
from loadtest.table import aligned
from serving.client import AsyncClient
from serving.deployment import Deployment, temporary_deployment
from serving.modes import MODES
from serving.ports import free_port_block
from serving.topology import Topology, local_topology
from stages.errors import InputError, OnesweepError, ServiceError
from stages.parts import plan_host

PROMPT = b"The old man looked at the sea and said that "
MAX_USERS = 64
"""Requests in flight that a router takes by default."""
MAX_SCRAPE_S = 3600.0
SCRAPE_TIMEOUT_S = 10.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy knows loopback."""
TARGET = 0.98
"""Least throughput with the default share of traces, over that of the same deployment unwatched."""
SHARES = {"off": None, "default": 0.01, "all": 1.0}
"""Share of requests that are traced, by what a row is called; None: not watched at all."""


TRACES = ("--traces", "file:/dev/null")
"""A collector would work on these cores, too: writing the spans down stands for sending them."""


class TextDiffers(OnesweepError):
    """Who is watched writes something else: nothing that is measured then means anything."""


@dataclass(frozen=True)
class SeeingBench:
    """What `onesweep bench seeing` is told."""

    checkpoint: Path
    modes: tuple[str, ...] = ("sweep", "ar")
    users: int = 4
    requests: int = 2
    """Of each user, in a turn."""
    max_bytes: int = 64
    rounds: int = 40
    """Turns of each deployment in each mode."""
    hosts: int = 3
    watched: tuple[str, ...] = ("off", "default", "all")
    """What is compared with the first of them, `off`; see SHARES."""
    scrape_s: float = 1.0
    """Seconds of a deployment's turns between scrapes; a Prometheus takes 15 unless told otherwise."""


@dataclass(frozen=True)
class Turn:
    """The same work for every deployment."""

    elapsed_s: float
    latency_ms: float
    """Median of its requests."""
    processor_s: float
    """Of all its servers."""


@dataclass(frozen=True)
class SeeingFigures:
    """One mode, watched in one way."""

    mode: str
    watched: str
    requests_per_s: float
    latency_p50_ms: float
    throughput: Estimate
    """Over that of the deployment that is not watched, round by round: the median, with a 95 % interval. Latency and
    processor time likewise."""
    latency: Estimate
    processor: Estimate

    @property
    def met(self) -> bool | None:
        """None where no target is set, or the interval holds it: more rounds would tell."""
        if self.watched != "default":
            return None
        low, high = (
            self.throughput.value if end is None else end for end in (self.throughput.low, self.throughput.high)
        )
        return True if low >= TARGET else False if high < TARGET else None


def check_seeing(bench: SeeingBench) -> None:
    """Raises InputError, CheckpointError."""
    for name, value, most in (
        ("users", bench.users, MAX_USERS),
        ("requests", bench.requests, 1000),
        ("rounds", bench.rounds, 1000),
    ):
        if not 1 <= value <= most:
            raise InputError(f"--{name} must be 1 to {most}, not {value}")
    if bench.max_bytes < 1:
        raise InputError(f"--bytes must be at least 1, not {bench.max_bytes}")
    for mode in bench.modes:
        if mode not in MODES:
            raise InputError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if not 0 < bench.scrape_s <= MAX_SCRAPE_S:
        raise InputError(f"--scrape-s must be above 0 and at most {MAX_SCRAPE_S:g}, not {bench.scrape_s}")
    if bench.watched[0] != "off" or not set(bench.watched) <= SHARES.keys():
        raise InputError(
            f"--watched {','.join(bench.watched)!r} must be off, and what it is compared with: default, all"
        )
    _topology(bench)


def measure_seeing(bench: SeeingBench) -> list[SeeingFigures]:
    """Raises OnesweepError."""
    check_seeing(bench)
    with ExitStack() as stack:
        deployments = {watched: stack.enter_context(_deployed(bench, SHARES[watched])) for watched in bench.watched}
        turns = asyncio.run(_turns(bench, deployments))
    return [_figures(bench, mode, watched, turns) for mode in bench.modes for watched in bench.watched]


def seeing_table(figures: list[SeeingFigures]) -> str:
    header = ("mode", "watched", "requests /s", "p50 ms", "throughput", "latency", "processor", "met")
    rows = [
        (
            *(f.mode, f.watched, f"{f.requests_per_s:.1f}", f"{f.latency_p50_ms:.1f}"),
            *(_shown(estimate) for estimate in (f.throughput, f.latency, f.processor)),
            "-" if f.watched != "default" else {True: "yes", False: "no", None: "open"}[f.met],
        )
        for f in figures
    ]
    return aligned(header, rows)


def seeing_record(bench: SeeingBench, figures: list[SeeingFigures]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    settings = {**asdict(bench), "checkpoint": bench.checkpoint.name}
    return {"bench": "seeing", **settings, "target": TARGET, "figures": [asdict(f) for f in figures]}


def _topology(bench: SeeingBench) -> Topology:
    parts = plan_host(bench.checkpoint, (0,)).parts
    return local_topology(bench.hosts, parts, bench.checkpoint, free_port_block(bench.hosts + 1) + 1)


@contextmanager
def _deployed(bench: SeeingBench, share: float | None) -> Iterator[Deployment]:
    options = [] if share is None else ["--metrics", "127.0.0.1:0", "--log-format", "json", *TRACES]
    more = [] if share is None else ["--trace-share", str(share)]
    with temporary_deployment(
        _topology(bench), bench.checkpoint, host_options=options, router_options=[*options, *more]
    ) as deployment:
        yield deployment


async def _turns(bench: SeeingBench, deployments: dict[str, Deployment]) -> dict[tuple[str, str], list[Turn]]:
    """By mode and deployment. The order rotates: a slow moment of the machine falls on every one of them."""
    turns: dict[tuple[str, str], list[Turn]] = {(mode, name): [] for mode in bench.modes for name in deployments}
    expected: dict[str, list[bytes]] = {}
    names = list(deployments)
    scrapers = {name: Scraper(deployment, bench.scrape_s, name != "off") for name, deployment in deployments.items()}
    for number in range(-1, bench.rounds):  # the first round warms up
        for mode in bench.modes:
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                turn, texts = await _turn(bench, mode, deployments[name], scrapers[name])
                if texts != expected.setdefault(mode, texts):
                    raise TextDiffers(f"mode {mode}: watched as {name}, a text is another")
                if number >= 0:
                    turns[mode, name].append(turn)
    return turns


async def _turn(bench: SeeingBench, mode: str, deployment: Deployment, scraper: Scraper) -> tuple[Turn, list[bytes]]:
    latencies: list[float] = []

    async def user(client: AsyncClient, first_seed: int) -> list[bytes]:
        texts = []
        for seed in range(first_seed, first_seed + bench.requests):
            begin = time.perf_counter()
            result = await client.generate(PROMPT, mode=mode, max_bytes=bench.max_bytes, seed=seed)
            latencies.append((time.perf_counter() - begin) * 1000)
            texts.append(result.output)
        return texts

    async with AsyncClient(deployment.topology.router) as client:
        with scraper.turn():
            worked_s, begin = _processor_s(deployment), time.perf_counter()
            texts = await asyncio.gather(*(user(client, number * bench.requests) for number in range(bench.users)))
            elapsed_s = time.perf_counter() - begin
            worked_s = _processor_s(deployment) - worked_s
    return Turn(elapsed_s, statistics.median(latencies), worked_s), [text for one in texts for text in one]


class Scraper:
    """Reads the metrics of a deployment's servers during its turns, as a Prometheus would."""

    def __init__(self, deployment: Deployment, pause_s: float, watched: bool) -> None:
        """Raises ServiceError for a watched server that does not say where its metrics are."""
        self.addresses = [address_of(deployment, name) for name in deployment.processes] if watched else []
        self.pause_s = self._left_s = pause_s
        """Of its turns, until the next time."""
        self.trouble = ""

    @contextmanager
    def turn(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._scrape, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if self.trouble:
            raise ServiceError(self.trouble)

    def _scrape(self, stop: threading.Event) -> None:
        begin = time.perf_counter()
        while not stop.wait(self._left_s):
            for address in self.addresses:
                try:
                    with DIRECT.open(address, timeout=SCRAPE_TIMEOUT_S) as answer:
                        answer.read()
                except (OSError, HTTPException) as error:
                    self.trouble = f"cannot read {address}: {error}"
                    return
            begin, self._left_s = begin + self._left_s, self.pause_s
        self._left_s = max(self._left_s - (time.perf_counter() - begin), 0.0)


def address_of(deployment: Deployment, name: str) -> str:
    """Where a server's metrics are, as its log says. Raises ServiceError where it does not."""
    log = (deployment.directory / f"{name}.log").read_text()
    found = re.search(r"http://[0-9.:]+/metrics", log)
    if found is None:
        raise ServiceError(f"{name} does not say where its metrics are")
    return found[0]


def _processor_s(deployment: Deployment) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in deployment.processes.values()]
    return float(sum(each.user + each.system for each in times))


def _figures(bench: SeeingBench, mode: str, watched: str, turns: dict[tuple[str, str], list[Turn]]) -> SeeingFigures:
    own, plain = turns[mode, watched], turns[mode, "off"]

    return SeeingFigures(
        mode,
        watched,
        bench.users * bench.requests * len(own) / sum(turn.elapsed_s for turn in own),
        statistics.median(turn.latency_ms for turn in own),
        throughput=median_ratio([turn.elapsed_s for turn in plain], [turn.elapsed_s for turn in own]),
        latency=median_ratio([turn.latency_ms for turn in own], [turn.latency_ms for turn in plain]),
        processor=median_ratio([turn.processor_s for turn in own], [turn.processor_s for turn in plain]),
    )


def median_ratio(over: list[float], under: list[float]) -> Estimate:
    """Of the ratios of each round: what else the machine did in one of them does not weigh. Bootstrap interval.

    Rounds too short for the clock, with 0 under the line, tell nothing: NaN where there are no others.
    """
    known = [(a, b) for a, b in zip(over, under, strict=True) if b]
    if not known:
        return Estimate(math.nan)
    ratios = np.asarray([a / b for a, b in known])
    medians = np.median(ratios[resampled(len(ratios), seed=0)], axis=1)
    return Estimate(float(np.median(ratios)), *percentiles(medians))


def _shown(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    interval = "" if estimate.low is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{interval}"
