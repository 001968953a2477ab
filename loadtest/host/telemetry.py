"""The benchmark `seeing`: deployments without and with metrics, traces and JSON logs, in turns on one machine."""

from __future__ import annotations

import asyncio
import math
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

import numpy as np
import psutil

from onesweep.loadtest.host.benchmark import PROMPT, Benchmark, TextDiffers, check_modes, ring_of
from onesweep.loadtest.host.settings import TelemetrySettings
from onesweep.loadtest.report.table import Estimate, aligned, percentiles, resampled
from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.client.client import AsyncClient
from onesweep.stages.errors import InputError, ServiceError
from onesweep.stages.signals import run_interruptible

SCRAPE_TIMEOUT_S = 10.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows loopback
TARGET = 0.98  # least throughput with the default share of traces, over that of the same deployment unwatched
# Share of requests that are traced, by what a row is called; None: not watched at all.
SHARES = {"off": None, "default": 0.01, "all": 1.0}


# A collector would work on these cores, too: writing the spans down stands for sending them.
TRACES = ("--traces", "file:/dev/null")


@dataclass(frozen=True)
class TelemetryTurn:
    """The same work for every deployment."""

    elapsed_s: float
    latency_ms: float  # median of its requests
    processor_s: float  # of all its servers


@dataclass(frozen=True)
class TelemetryFigures:
    """One mode, watched in one way."""

    mode: str
    watched: str
    requests_per_s: float
    latency_p50_ms: float
    # Over that of the deployment that is not watched, round by round: the median, with a 95 % interval. Latency and
    # processor time likewise.
    throughput: Estimate
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


class TelemetryBench(Benchmark[TelemetrySettings, list[TelemetryFigures]]):
    """`onesweep bench seeing`: the first deployment is `off`, the others are compared with it."""

    @property
    def announcement(self) -> str:
        return f"{len(self.settings.watched)} deployments take turns, {self.settings.rounds} rounds ..."

    def check(self) -> None:
        watched = self.settings.watched
        check_modes(self.settings.modes)
        if watched[0] != "off" or not set(watched) <= SHARES.keys():
            raise InputError(f"--watched {','.join(watched)!r} must be off, and what it is compared with: default, all")
        ring_of(self.settings.checkpoint, self.settings.hosts)

    def measure(self) -> list[TelemetryFigures]:
        s = self.settings
        with ExitStack() as stack:
            deployments = {watched: stack.enter_context(_deployed(s, SHARES[watched])) for watched in s.watched}
            turns = run_interruptible(_turns(s, deployments))
        return [_figures(s, mode, watched, turns) for mode in s.modes for watched in s.watched]

    def table(self, result: list[TelemetryFigures]) -> str:
        header = ("mode", "watched", "requests /s", "p50 ms", "throughput", "latency", "processor", "met")
        rows = [
            (
                *(f.mode, f.watched, f"{f.requests_per_s:.1f}", f"{f.latency_p50_ms:.1f}"),
                *(_shown(estimate) for estimate in (f.throughput, f.latency, f.processor)),
                "-" if f.watched != "default" else {True: "yes", False: "no", None: "open"}[f.met],
            )
            for f in result
        ]
        return aligned(header, rows)

    def record(self, result: list[TelemetryFigures]) -> dict[str, Any]:
        settings = {**asdict(self.settings), "checkpoint": self.settings.checkpoint.name}
        return {"bench": "seeing", **settings, "target": TARGET, "figures": [asdict(f) for f in result]}


def _deployed(settings: TelemetrySettings, share: float | None) -> AbstractContextManager[Deployment]:
    options = [] if share is None else ["--metrics", "127.0.0.1:0", "--log-format", "json", *TRACES]
    return temporary_deployment(
        ring_of(settings.checkpoint, settings.hosts),
        settings.checkpoint,
        host_options=options,
        router_options=options if share is None else [*options, "--trace-share", str(share)],
    )


async def _turns(
    settings: TelemetrySettings, deployments: dict[str, Deployment]
) -> dict[tuple[str, str], list[TelemetryTurn]]:
    """By mode and deployment. The order rotates: a slow moment of the machine falls on every one of them."""
    turns: dict[tuple[str, str], list[TelemetryTurn]] = {
        (mode, name): [] for mode in settings.modes for name in deployments
    }
    expected: dict[str, list[bytes]] = {}
    names = list(deployments)
    scrapers = {name: Scraper(deployment, settings.scrape_s, name != "off") for name, deployment in deployments.items()}
    for number in range(-1, settings.rounds):  # the first round warms up
        for mode in settings.modes:
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                turn, texts = await _turn(settings, mode, deployments[name], scrapers[name])
                # being watched must change no byte, or times of the two would be of different work
                if texts != expected.setdefault(mode, texts):
                    raise TextDiffers(f"mode {mode}: watched as {name}, a text is another")
                if number >= 0:
                    turns[mode, name].append(turn)
    return turns


async def _turn(
    settings: TelemetrySettings, mode: str, deployment: Deployment, scraper: Scraper
) -> tuple[TelemetryTurn, list[bytes]]:
    latencies: list[float] = []

    async def user(client: AsyncClient, first_seed: int) -> list[bytes]:
        texts = []
        for seed in range(first_seed, first_seed + settings.requests):
            begin = time.perf_counter()
            result = await client.generate(PROMPT, mode=mode, max_bytes=settings.max_bytes, seed=seed)
            latencies.append((time.perf_counter() - begin) * 1000)
            texts.append(result.output)
        return texts

    async with AsyncClient(deployment.topology.router) as client:
        with scraper.turn():  # only while this deployment works: the scraper takes time of these cores
            worked_s, begin = _processor_s(deployment), time.perf_counter()
            texts = await asyncio.gather(
                *(user(client, number * settings.requests) for number in range(settings.users))
            )
            elapsed_s = time.perf_counter() - begin
            worked_s = _processor_s(deployment) - worked_s
    return TelemetryTurn(elapsed_s, statistics.median(latencies), worked_s), [text for one in texts for text in one]


class Scraper:
    """Reads the metrics of a deployment's servers during its turns, as a Prometheus would."""

    def __init__(self, deployment: Deployment, pause_s: float, watched: bool) -> None:
        """Raises ServiceError for a watched server that does not say where its metrics are."""
        self.addresses = [address_of(deployment, name) for name in deployment.processes] if watched else []
        # Only its own turns count: a deployment that rests while others are measured is not scraped more often.
        self.pause_s = self._left_s = pause_s  # seconds of its turns until the next scrape
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
    """The URL of a server's metrics, from its log. Raises ServiceError where the log has none."""
    log = (deployment.directory / f"{name}.log").read_text()
    found = re.search(r"http://[0-9.:]+/metrics", log)
    if found is None:
        raise ServiceError(f"{name} does not say where its metrics are")
    return found[0]


def _processor_s(deployment: Deployment) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in deployment.processes.values()]
    return float(sum(each.user + each.system for each in times))


def _figures(
    settings: TelemetrySettings, mode: str, watched: str, turns: dict[tuple[str, str], list[TelemetryTurn]]
) -> TelemetryFigures:
    own, plain = turns[mode, watched], turns[mode, "off"]
    return TelemetryFigures(
        mode,
        watched,
        settings.users * settings.requests * len(own) / sum(turn.elapsed_s for turn in own),
        statistics.median(turn.latency_ms for turn in own),
        throughput=median_ratio([turn.elapsed_s for turn in plain], [turn.elapsed_s for turn in own]),
        latency=median_ratio([turn.latency_ms for turn in own], [turn.latency_ms for turn in plain]),
        processor=median_ratio([turn.processor_s for turn in own], [turn.processor_s for turn in plain]),
    )


def median_ratio(over: list[float], under: list[float]) -> Estimate:
    """Median of the ratios of each round, with a bootstrap interval: other work of the machine distorts single rounds.

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
