"""One run of `onesweep bench fuzz`: targets take turns, and all processes are checked after every batch."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from onesweep.loadtest.fuzz.answers import AnsweredTarget, AnswersTarget
from onesweep.loadtest.fuzz.base import Finding, FuzzTarget, TargetTally
from onesweep.loadtest.fuzz.commands import WIRE, FuzzSettings
from onesweep.loadtest.fuzz.files import FilesTarget
from onesweep.loadtest.fuzz.healthy import Captures, Healthy, record
from onesweep.loadtest.fuzz.http import HttpTarget
from onesweep.loadtest.fuzz.inside import AdmissionTarget, HostTarget
from onesweep.loadtest.fuzz.servers import RouterTarget, StageTarget, TrainingTarget
from onesweep.loadtest.fuzz.testbed import LEASE_S, FuzzTestbed, ProcessWatch, open_fuzz_testbed
from onesweep.loadtest.report.record import commit, this_machine
from onesweep.loadtest.report.table import aligned
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.v1 import stage_pb2, stage_pb2_grpc

SHARES = {"stage": 17, "router": 4, "answers": 1, "http": 3, "training": 1, "answered": 1}
SHARES |= {"admission": 50, "host": 10, "files": 20}  # parts of the inputs by target; those in this process are quick
EMPTY_S = 3 * LEASE_S  # a session that was just used keeps its lease


@dataclass
class FuzzResult:
    """The outcome of a run."""

    settings: FuzzSettings
    tallies: list[TargetTally]
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
    async with open_fuzz_testbed((settings.checkpoint or SHIPPED).resolve()) as testbed:
        captures = await record(testbed)
        requests, answers = (sum(map(len, kept.values())) for kept in (captures.requests, captures.answers))
        say(f"{requests} requests and {answers} answers captured")
        healthy, watch = Healthy(testbed), ProcessWatch(testbed)
        general = TargetTally("all")
        async with _targets(settings, testbed, captures) as targets:
            healthy.start()
            try:
                await _take_turns(settings, targets, watch, say, begin + settings.seconds)
            finally:
                healthy.stop()
        for trouble in healthy.trouble:
            general.finding(f"a healthy request: {trouble}")
        # when nobody asks any more, nothing may be held: what is left here would grow for ever
        await check_empty(testbed.hosts, general)
        watch.look(general)
        tallies = [*(target.tally for target in targets), general]
        right = dict(healthy.right)
        return FuzzResult(
            settings, tallies, right, healthy.told_to_wait, watch.rss_mb, watch.descriptors, time.monotonic() - begin
        )


@contextlib.asynccontextmanager
async def _targets(settings: FuzzSettings, testbed: FuzzTestbed, captures: Captures) -> AsyncIterator[list[FuzzTarget]]:
    makers: dict[str, Callable[[random.Random], FuzzTarget]] = {
        "stage": lambda rng: StageTarget(testbed, captures, rng),
        "router": lambda rng: RouterTarget(testbed, captures, rng),
        "answers": lambda rng: AnswersTarget(testbed, captures, rng),
        "http": lambda rng: HttpTarget(testbed, rng),
        "training": lambda rng: TrainingTarget(testbed, rng),
        "answered": lambda rng: AnsweredTarget(testbed, captures, rng),
        "admission": lambda rng: AdmissionTarget(testbed.checkpoint, captures.hops, rng),
        "host": lambda rng: HostTarget(testbed.checkpoint, captures.hops, rng),
        "files": lambda rng: FilesTarget(rng),
    }
    targets: list[FuzzTarget] = []
    try:
        for name in settings.targets:
            # a generator of its own for each: what one target does depends on no other
            targets.append(makers[name](random.Random(f"{settings.seed} {name}")))
        yield targets
    finally:
        for target in targets:
            await target.close()


async def _take_turns(
    settings: FuzzSettings, targets: Sequence[FuzzTarget], watch: ProcessWatch, say: Callable[[str], None], until: float
) -> None:
    whole = sum(SHARES[target.name] for target in targets)
    due = {target: -(-settings.inputs * SHARES[target.name] // whole) for target in targets}
    # in turns, so that a run that is stopped by its time has met every target
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


async def check_empty(hosts: Sequence[str], tally: TargetTally) -> None:
    """Book a finding for every host that holds anything when all requests have ended."""
    for address in hosts:
        try:
            held = await _held(address)
        except grpc.aio.AioRpcError as error:
            held = f"does not say what it holds: {error.code().name}"
        if held:
            tally.finding(f"a host {held}")


async def _held(address: str) -> str:
    """Words for what a host still holds after it had time to let go."""
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


MOST_ANSWERS = 5


def fuzz_table(result: FuzzResult) -> str:
    """Inputs and the commonest answers of each target."""
    rows = []
    for tally in result.tallies:
        if tally.inputs:
            shown = ", ".join(f"{what} {count}" for what, count in tally.answers.most_common(MOST_ANSWERS))
            where = "sockets" if tally.target in WIRE else "in process"
            rows.append([tally.target, where, f"{tally.inputs}", f"{len(tally.findings)}", shown])
    return aligned(["target", "over", "inputs", "findings", "commonest answers"], rows)


def fuzz_notes(result: FuzzResult) -> list[str]:
    wired = sum(tally.inputs for tally in result.tallies if tally.target in WIRE)
    right = ", ".join(f"{mode} {count}" for mode, count in sorted(result.healthy_right.items()))
    notes = [
        f"{result.inputs} inputs, {wired} of them over sockets, in {result.seconds:.0f} s, "
        f"seed {result.settings.seed}, commit {commit()}",
        f"healthy requests with the right answer: {sum(result.healthy_right.values())} ({right}); "
        f"told to come back later: {result.told_to_wait}",
        "most memory: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in result.rss_mb.items()),
        "most descriptors: " + ", ".join(f"{name} {count}" for name, count in result.descriptors.items()),
    ]
    return notes + [f"FOUND {f.count} x {f.target}: {f.what}" for f in result.findings]


def fuzz_record(result: FuzzResult) -> dict[str, Any]:
    return {
        "fuzz": 1,
        "commit": commit(),
        "machine": this_machine().sentence,
        "seed": result.settings.seed,
        "inputs": result.inputs,
        "seconds": result.seconds,
        "targets": [tally.to_record() for tally in result.tallies],
        "findings": [finding.to_record() for finding in result.findings],
        "healthy_right": result.healthy_right,
        "told_to_wait": result.told_to_wait,
        "rss_mb": result.rss_mb,
        "descriptors": result.descriptors,
    }
