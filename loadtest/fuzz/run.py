"""One run: targets take turns, and after every batch everything is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from loadtest.fuzz.answers import AnsweredTarget, AnswersTarget
from loadtest.fuzz.captures import Captures, record
from loadtest.fuzz.files import FilesTarget
from loadtest.fuzz.findings import Finding, Tally
from loadtest.fuzz.healthy import Healthy
from loadtest.fuzz.http import HttpTarget
from loadtest.fuzz.inside import AdmissionTarget, HostTarget
from loadtest.fuzz.router import RouterTarget
from loadtest.fuzz.scene import LEASE_S, Scene, open_scene
from loadtest.fuzz.settings import FuzzSettings
from loadtest.fuzz.stage import StageTarget
from loadtest.fuzz.target import Target
from loadtest.fuzz.training import TrainingTarget
from loadtest.fuzz.watch import Watch
from stages.v1 import stage_pb2, stage_pb2_grpc

SHARES = {
    "stage": 17,
    "router": 4,
    "answers": 1,
    "http": 3,
    "training": 1,
    "answered": 1,
    "admission": 50,
    "host": 10,
    "files": 20,
}
"""Of the inputs; targets in this process are quick."""
EMPTY_S = 3 * LEASE_S


@dataclass
class FuzzResult:
    """What came of a run."""

    settings: FuzzSettings
    tallies: list[Tally]
    healthy_right: dict[str, int] = field(default_factory=dict)
    told_to_wait: int = 0
    rss_mb: dict[str, float] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        return [finding for tally in self.tallies for finding in tally.findings]

    @property
    def inputs(self) -> int:
        return sum(tally.inputs for tally in self.tallies)


async def run_fuzz(settings: FuzzSettings, say: Callable[[str], None]) -> FuzzResult:
    """Raises OnesweepError when there is nothing to fuzz: a deployment that does not come up."""
    begin = time.monotonic()
    async with open_scene() as scene:
        captures = await record(scene)
        requests, answers = (sum(map(len, kept.values())) for kept in (captures.requests, captures.answers))
        say(f"{requests} requests and {answers} answers captured")
        healthy, watch = Healthy(scene.router, scene.gateway), Watch(scene)
        general = Tally("all")
        async with _targets(settings, scene, captures) as targets:
            healthy.start()
            try:
                await _take_turns(settings, targets, watch, say, begin + settings.seconds)
            finally:
                healthy.stop()
        for trouble in healthy.trouble:
            general.finding(f"a healthy request: {trouble}")
        await check_empty(scene.hosts, general)
        watch.look(general)
        tallies = [*(target.tally for target in targets), general]
        right = dict(healthy.right)
        return FuzzResult(
            settings, tallies, right, healthy.told_to_wait, watch.rss_mb, watch.descriptors, time.monotonic() - begin
        )


@contextlib.asynccontextmanager
async def _targets(settings: FuzzSettings, scene: Scene, captures: Captures) -> AsyncIterator[list[Target]]:
    makers: dict[str, Callable[[random.Random], Target]] = {
        "stage": lambda rng: StageTarget(scene, captures, rng),
        "router": lambda rng: RouterTarget(scene, captures, rng),
        "answers": lambda rng: AnswersTarget(scene, captures, rng),
        "http": lambda rng: HttpTarget(scene, rng),
        "training": lambda rng: TrainingTarget(scene, rng),
        "answered": lambda rng: AnsweredTarget(scene, captures, rng),
        "admission": lambda rng: AdmissionTarget(captures.hops, rng),
        "host": lambda rng: HostTarget(captures.hops, rng),
        "files": lambda rng: FilesTarget(rng),
    }
    targets: list[Target] = []
    try:
        for name in settings.targets:
            # a generator of its own for each: what one target does depends on no other
            targets.append(makers[name](random.Random(f"{settings.seed} {name}")))
        yield targets
    finally:
        for target in targets:
            await target.close()


async def _take_turns(
    settings: FuzzSettings, targets: Sequence[Target], watch: Watch, say: Callable[[str], None], until: float
) -> None:
    whole = sum(SHARES[target.name] for target in targets)
    due = {target: -(-settings.inputs * SHARES[target.name] // whole) for target in targets}
    while left := [target for target in targets if target.tally.inputs < due[target]]:
        for target in left:
            if time.monotonic() > until:
                return
            before = len(target.tally.findings)
            await target.send(min(target.batch_inputs, due[target] - target.tally.inputs))
            watch.look(target.tally)
            for finding in target.tally.findings[before:]:
                say(f"found: {finding.target}: {finding.what}")
        say(", ".join(f"{target.name} {target.tally.inputs}" for target in targets))


async def check_empty(hosts: Sequence[str], tally: Tally) -> None:
    """When nobody asks any more, nothing is held any more."""
    for address in hosts:
        try:
            held = await _held(address)
        except grpc.aio.AioRpcError as error:
            held = f"does not say what it holds: {error.code().name}"
        if held:
            tally.finding(f"a host {held}")


async def _held(address: str) -> str:
    """What a host still holds when it had time to let go, in words."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: stage_pb2_grpc.StageServiceAsyncStub = stage_pb2_grpc.StageServiceStub(channel)
        deadline = time.monotonic() + EMPTY_S
        while True:
            counters = (await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)).counters
            if not (counters.sessions or counters.queued):
                return ""
            if time.monotonic() > deadline:
                return f"still holds {counters.sessions} sessions, {counters.queued} hops"
            await asyncio.sleep(0.2)
