"""One run of `onesweep bench fuzz`: targets take turns, and all processes are checked after every batch."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from onesweep.loadtest.fuzz import attacker
from onesweep.loadtest.fuzz.answers import AnsweredTarget, AnswersTarget
from onesweep.loadtest.fuzz.base import Finding, FuzzTarget, TargetTally
from onesweep.loadtest.fuzz.commands import WIRE, FuzzSettings
from onesweep.loadtest.fuzz.files import FilesTarget
from onesweep.loadtest.fuzz.healthy import Captures, Healthy, record
from onesweep.loadtest.fuzz.http import HttpTarget
from onesweep.loadtest.fuzz.inside import HostTarget
from onesweep.loadtest.fuzz.servers import RouterTarget, StageTarget
from onesweep.loadtest.fuzz.testbed import LEASE_S, ROUTER, STAGE, FuzzTestbed, ProcessWatch, open_fuzz_testbed
from onesweep.loadtest.report.record import commit, this_machine
from onesweep.loadtest.report.table import Table, aligned, number_column, percentile, text_column
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.v1 import stage_pb2, stage_pb2_grpc

SHARES = {"stage": 17, "router": 4, "answers": 1, "http": 3, "answered": 1}
SHARES |= {"host": 10, "files": 70}  # parts of the inputs by target; those in this process are quick
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
        "answered": lambda rng: AnsweredTarget(testbed, captures, rng),
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


# `--attacks`: HTTP/2 attacks on every port, and what others notice of them

CONNECTIONS = {"silent": 6000, "idle": 6000}  # more than a server takes
FLOODING = 4  # connections of the other attacks
MARGIN_S, LOOK_S = 30.0, 0.2


@dataclass(frozen=True)
class AttackResult:
    """One attack on one port, beside healthy requests."""

    target: str
    attack: str
    sent: int  # frames, or connections
    ended: int  # connections, by the server
    right: int  # healthy requests, with the text that they have without an attack
    p95_ms: float | None
    slower: float | None  # than without an attack
    rss_before_mb: float
    rss_mb: float  # the most
    trouble: list[str]


ATTACK_TABLE = Table[AttackResult](
    [
        *map(text_column, ("target", "attack", "sent", "ended", "right")),
        number_column("p95 ms", "p95_ms", 0),
        number_column("x", "slower", 2),
        number_column("MB before", "rss_before_mb", 0),
        number_column("most MB", "rss_mb", 0),
        ("findings", lambda row: str(len(row.trouble))),
    ],
    2,
)


async def run_attacks(settings: FuzzSettings, say: Callable[[str], None]) -> list[AttackResult]:
    """Raises OnesweepError where there is nothing to attack."""
    assert settings.attacks is not None
    async with open_fuzz_testbed((settings.checkpoint or SHIPPED).resolve()) as testbed:
        ports = {
            "router": (testbed.router, f"/{ROUTER.full_name}/Generate"),
            "host-1": (testbed.hosts[0], f"/{STAGE.full_name}/Describe"),
            "http": (testbed.gateway, "/v1/completions"),
        }
        calm, rows = await asyncio.to_thread(Healthy, testbed), list[AttackResult]()
        calm.start()
        await asyncio.sleep(settings.attacks)
        await asyncio.to_thread(calm.stop)
        for name, attack in ((name, attack) for name in ports for attack in attacker.ATTACKS):
            rows.append(row := await _attack(testbed, calm, name, attack, ports[name], settings.attacks))
            say(f"{name} {attack}: {row.right} right, p95 {row.p95_ms or 0:.0f} ms {'; '.join(row.trouble)}")
        return rows


async def _attack(
    testbed: FuzzTestbed, calm: Healthy, name: str, attack: str, port: tuple[str, str], seconds: float
) -> AttackResult:
    """:param port: its address, and the path of a call."""
    healthy, watch, tally = Healthy(testbed, calm.answers), ProcessWatch(testbed), TargetTally(attack)
    watch.look(tally)
    before_mb = watch.rss_mb[name]
    # of the lowest priority: an attacker elsewhere would not take this machine's processor
    command = ["nice", "-n", "19", sys.executable, "-P", str(Path(attacker.__file__))]
    arguments = [attack, *port, str(seconds), str(CONNECTIONS.get(attack, FLOODING))]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    healthy.start()
    try:
        until = time.monotonic() + seconds + MARGIN_S
        while process.poll() is None and time.monotonic() < until:
            watch.look(tally)
            await asyncio.sleep(LOOK_S)
    finally:
        process.kill()
        await asyncio.to_thread(healthy.stop)
    counts = Counter(json.loads(process.communicate()[0] or "{}"))
    p95_s, before_s = (percentile(sorted(each.took_s), 95) for each in (healthy, calm))
    return AttackResult(
        target=name,
        attack=attack,
        sent=counts["sent"],
        ended=counts["ended"] + counts["refused"],
        right=sum(healthy.right.values()),
        p95_ms=p95_s and 1000 * p95_s,
        slower=p95_s / before_s if p95_s and before_s else None,
        rss_before_mb=before_mb,
        rss_mb=watch.rss_mb[name],
        trouble=[f"{name}, {attack}: {words}" for words in [*healthy.trouble, *(f.what for f in tally.findings)]],
    )


def attacks_record(settings: FuzzSettings, rows: list[AttackResult]) -> dict[str, Any]:
    about = {"commit": commit(), "machine": this_machine().sentence, "seconds": settings.attacks}
    return {"attacks": 1, **about, "rows": [asdict(row) for row in rows]}
