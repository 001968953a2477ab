"""A deployment in virtual time: the real hosts, routers and clients on a network in memory, and a schedule in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import Process, VirtualLoop, virtual_time
from loadtest.simulation.network import MemoryNetwork
from loadtest.simulation.schedule import CLIENT_NAMES, HOSTS, REPLICAS, ROUTER_NAMES, Asked, PlannedFault, Schedule
from loadtest.simulation.served import MemoryServer
from serving.client.client import AsyncClient, RequestRefused, Result, RouterError
from serving.router.active_release import ActiveRelease, RouterParts
from serving.router.admission import Admission
from serving.router.ring import Ring, RingView
from serving.router.rollout import Rollout
from serving.router.service import RouterService
from serving.router.settings import RingSettings
from serving.router.topology import HostEntry, Topology
from serving.v1 import router_pb2_grpc
from stages.backends import Backend
from stages.checkpoint.checkpoint import save_ar, save_part, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import Manifest
from stages.host.drafter import Drafter
from stages.host.host import Host
from stages.host.loading import Loader, Sources
from stages.host.next_hosts import NextHosts
from stages.host.parts import Release, full_state_bytes, load_parts, plan_host, wiring_problem
from stages.host.server import RETRY_S, housekeeping
from stages.host.service import StageService
from stages.host.settings import HostSettings
from stages.model.architecture import Architecture
from stages.model.block import Block, Codes
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel
from stages.v1 import stage_pb2_grpc
from stages.wire import channel
from stages.wire.status import DecodeErrors
from stages.wire.tls import Security
from stages.wire.tokens import Keyring

PASS_S, SLOW = 0.002, 50.0  # virtual time of a pass, and how much longer a slow host takes
SLOW_LINK_S = 0.3
# Seldom enough to be cheap: each message on an idle link is real work for the machine that simulates it.
KEEP_WARM_S = 0.5
PATIENCE_S, HURRY_S, LEAVE_S, LATE_S = 60.0, 0.2, 0.15, 0.5
READY_S, SETTLE_S = 10.0, 20.0  # a lease is longer: no session may be left to it
MODES = ("sweep", "chunked", "ar", "ar-speculative")
PROMPTS = ("The sea was calm. ", "Nobody saw it again, ", "A ship, ", "It was late in the year, and cold. " * 6)
# Few steps, and several sweeps a text: most of the time of a schedule is arithmetic.
SETTINGS = {"sweep": {"steps": 1}, "chunked": {"steps": 1, "chunk": 4}}
SECURITY = Security(insecure=True)


@dataclass(frozen=True)
class Case:
    """A request that has one answer."""

    mode: str
    prompt: str
    seed: int
    max_bytes: int


CASES = tuple(
    Case(mode, prompt, 100 + i, 8 + 4 * i) for mode in MODES for i, prompt in enumerate(PROMPTS)
)  # of all modes, each text of another length


class Weights:
    """A tiny model with random weights, read once for all schedules."""

    def __init__(self, directory: Path) -> None:
        """:param directory: for its files."""
        torch.set_num_threads(1)
        a = Architecture(parts=3, layers=1, width=32, heads=2, context_length=512, code_dim=32, condition_dim=16)
        codes, generator = Codes(0, a.code_dim), torch.Generator().manual_seed(0)
        partition = NoisePartition("uniform", (8.0, 1.5, 0.6, 0.2))
        write_manifest(directory / "chain", Manifest("chain", a, (None,) * 3, codes, partition, PROBE_TEXT))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for index in range(a.parts):
                save_part(directory / "chain", _shaken(Block(a, index, codes), generator))
            for name, parts in (("ar", 3), ("local", 1)):
                model = _shaken(ArModel(Architecture(**{**vars(a), "parts": parts})), generator)
                manifest = Manifest("ar", model.architecture, (None,) * parts, probe_text=PROBE_TEXT)
                write_manifest(directory / name, manifest)
                save_ar(directory / name, model)
        self.directory, self.backend = directory, Backend()
        self.parts = [load_parts(plan_host(directory, (block,)), self.backend) for block in range(a.parts)]
        self.router = RouterParts.read(directory)
        self.topology = Topology(
            tuple(
                HostEntry(name, f"10.0.0.{i + 1}:7701", (i // REPLICAS,), f"10.0.0.{i + 1}:7701")
                for i, name in enumerate(HOSTS)
            )
        )

    @cached_property
    def texts(self) -> list[bytes]:
        """The text of each case without faults, one request after the other."""
        requests = (tuple(Asked(case, 0.0) for case in range(len(CASES))),)
        outcomes = run_schedule(self, Schedule(-1, requests, (ROUTER_NAMES[:1],), ())).outcomes
        assert all(each.status == "OK" and not each.replays for each in outcomes), outcomes
        return [each.text for each in outcomes]


def _shaken(module: Any, generator: torch.Generator) -> Any:  # noqa: ANN401 - a Block or an ArModel
    """Weights so large that every byte of the context shows in the output."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@dataclass(frozen=True)
class RequestOutcome:
    """A request, as its client saw it."""

    case: int
    status: str  # OK, LEFT where the client went, or a status of gRPC
    text: bytes
    took_s: float
    patience_s: float
    replays: int  # times that the work was moved to other hosts, or to another router
    said: str = ""


@dataclass(frozen=True)
class ScheduleRun:
    """The outcome of one schedule."""

    outcomes: list[RequestOutcome]
    problems: list[str]  # what no run may have, beside texts
    events: int  # a digest of all that was sent
    seconds: float  # of virtual time


class SimulatedHost(Host):
    """A host whose passes take a fixed virtual time, on the event loop."""

    pass_s = PASS_S
    _has_pass = False

    def _go(self) -> None:
        if not self._has_pass and len(self.scheduler):
            self._has_pass = True
            asyncio.get_running_loop().call_later(self.pass_s, self._pass)

    def _pass(self) -> None:
        self._has_pass = False
        self._finish(self.scheduler.turn())
        self._go()


class World:
    """The processes of one schedule, by name."""

    def __init__(self, loop: VirtualLoop, weights: Weights) -> None:
        self.loop, self.weights, self.network = loop, weights, MemoryNetwork(loop)
        self.processes: dict[str, Process] = {}
        self.hosts: dict[str, SimulatedHost] = {}
        self.rings: dict[str, Ring] = {}
        self.lasting: dict[PlannedFault, None] = {}
        for entry in weights.topology.hosts:
            self.network.places[entry.address] = entry.name
        self.addresses = {name: f"10.0.1.{i + 1}:7700" for i, name in enumerate(ROUTER_NAMES)}

    def start(self, name: str) -> None:
        """Start a process on the machine of that name."""
        process = self.processes[name] = Process(self.loop, name)
        process.context.run(self._start_router if name in ROUTER_NAMES else self._start_host, process, name)

    def _start_host(self, process: Process, name: str) -> None:
        entry = self.weights.topology.host(name)
        parts = self.weights.parts[entry.blocks[0]]
        if (drafter := parts.ar_drafter) is not None:  # it learns how long its drafts should be
            parts = replace(parts, ar_drafter=Drafter(drafter.vocabulary, drafter.model))
        plan, settings = parts.plan, HostSettings(name, keep_warm_s=KEEP_WARM_S, prefix_mb=1)
        links = NextHosts(
            lambda address, other: wiring_problem([plan], address, other),
            *(full_state_bytes(plan), plan.message_bytes(), settings.hop_timeout_s, settings.keep_warm_s),
            security=SECURITY,
        )
        host = self.hosts[name] = SimulatedHost(Release("tiny", plan, parts), settings, links)
        sources = Sources(self.weights.directory, entry.blocks, None)
        service = StageService(host, Loader(host, sources, self.weights.backend, plan.message_bytes()))
        links.set_addresses(self.weights.topology.successors(entry))
        server: Any = MemoryServer(self.network, [DecodeErrors()], plan.message_bytes())
        stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        server.listen(entry.address)
        process.start(_keep_ready(host, service))
        process.start(housekeeping(host))

    def _start_router(self, process: Process, name: str) -> None:
        ring = self.rings[name] = Ring(
            self.weights.topology.hosts, RingSettings(keep_warm_s=KEEP_WARM_S), security=SECURITY
        )
        rollout = Rollout(ring, ActiveRelease.over(RingView(ring), self.weights.router), None, None)
        service = RouterService(rollout, Keyring(), Admission(), ring.settings.hop_timeout_s)
        server: Any = MemoryServer(self.network, [DecodeErrors()])
        router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
        server.listen(self.addresses[name])
        process.start(ring.open())
        process.start(ring.watch())
        process.start(rollout.keep_up_to_date())

    async def open(self) -> None:
        """Start all, and wait until every router has a way through every host."""
        for name in (*HOSTS, *ROUTER_NAMES):
            self.start(name)
        async with asyncio.timeout(READY_S):
            while not all(ring.links and not any(link.problem for link in ring.links) for ring in self.rings.values()):
                await asyncio.sleep(RETRY_S)

    async def settled(self) -> list[str]:
        """Wait until no session is open; what is left after a while is a problem each."""
        due = self.loop.now_s + SETTLE_S
        while left := [name for name, host in self.hosts.items() if host.sessions.sessions]:
            if self.loop.now_s > due:
                return [f"{name} still holds sessions" for name in left]
            await asyncio.sleep(RETRY_S)
        return []

    def begin(self, fault: PlannedFault) -> None:
        """Let a fault begin, and end in its time."""
        names, network = fault.targets, self.network
        self.lasting[fault] = None
        self.loop.call_later(fault.length_s, self.end, fault)
        match fault.kind:
            case "kill":
                network.kill(self.processes[names[0]])
            case "freeze":
                network.freeze(self.processes[names[0]])
            case "cut":
                network.cut(*names)
                network.cut(*names[::-1])
            case "one-way":
                network.cut(*names)
            case "reset":
                network.reset(*names)
            case "slow":
                self.hosts[names[0]].pass_s = PASS_S * SLOW
            case "slow-link":
                network.link(*names).delay_s += SLOW_LINK_S

    def end(self, fault: PlannedFault) -> None:
        """Let a fault end, unless it has."""
        names, network = fault.targets, self.network
        if fault not in self.lasting:
            return
        del self.lasting[fault]
        match fault.kind:
            case "kill" if self.processes[names[0]].killed:
                self.start(names[0])
            case "freeze":
                self.processes[names[0]].resume()
            case "cut":
                network.mend(*names)
                network.mend(*names[::-1])
            case "one-way":
                network.mend(*names)
            case "slow":
                self.hosts[names[0]].pass_s = PASS_S
            case "slow-link":
                network.link(*names).delay_s -= SLOW_LINK_S

    async def client(self, name: str, routers: Sequence[str], requests: Sequence[Asked]) -> list[RequestOutcome]:
        """A client's requests, one after the other."""
        process = self.processes[name] = Process(self.loop, name)
        addresses = ",".join(self.addresses[router] for router in routers)
        client = process.context.run(partial(AsyncClient, addresses, token="", insecure=True))
        outcomes = []
        for asked in requests:
            await asyncio.sleep(asked.pause_s)
            lasting = {fault.kind for fault in self.lasting if fault.targets == (name,)}
            task = process.start(self._ask(client, asked.case, HURRY_S if "hurry" in lasting else PATIENCE_S))
            if "leave" in lasting:
                self.loop.call_later(LEAVE_S, task.cancel)
            outcomes.append(await task)
        return outcomes

    async def _ask(self, client: AsyncClient, number: int, patience_s: float) -> RequestOutcome:
        case, begin_s, text, status, said, replays = CASES[number], self.loop.now_s, b"", "OK", "", 0
        settings: dict[str, Any] = {"mode": case.mode, "seed": case.seed, "max_bytes": case.max_bytes}
        settings |= SETTINGS.get(case.mode, {})
        try:
            async for item in client.stream(case.prompt, timeout_s=patience_s, **settings):
                if isinstance(item, Result):
                    replays = item.replays
                else:
                    text += item
        except asyncio.CancelledError:
            status = "LEFT"
        except (RequestRefused, RouterError) as error:
            status, said = error.code.name, str(error)
        return RequestOutcome(number, status, text, self.loop.now_s - begin_s, patience_s, replays, said)


async def _keep_ready(host: Host, service: StageService) -> None:
    while True:
        service.not_ready_reason = host.next_hosts.problem
        await asyncio.sleep(RETRY_S)


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Log nothing in the block but errors, into the list: no fault of a schedule is one."""
    said, root, level = list[str](), logging.getLogger(), logging.root.manager.disable
    errors = logging.Handler(logging.ERROR)
    errors.emit = lambda record: said.append(f"{record.getMessage()} {record.exc_info or ''}")  # type: ignore[method-assign]
    root.addHandler(errors)
    logging.disable(logging.WARNING)
    try:
        yield said
    finally:
        logging.disable(level)
        root.removeHandler(errors)


def run_schedule(weights: Weights, schedule: Schedule) -> ScheduleRun:
    """Run a schedule from its start to its end, in virtual time. Deterministic."""
    with _quiet() as said, virtual_time() as loop:
        world, before = World(loop, weights), channel.connect
        connect: Any = partial(MemoryChannel, world.network)
        channel.connect = connect
        try:
            return loop.run_until_complete(_run(world, schedule, said))
        except (RuntimeError, TimeoutError) as error:
            return ScheduleRun([], [f"it came to no end: {error!r}"], world.network.events, loop.now_s)
        finally:
            channel.connect = before


async def _run(world: World, schedule: Schedule, said: list[str]) -> ScheduleRun:
    loop = world.loop
    await world.open()
    begin_s = loop.now_s
    for fault in schedule.faults:
        loop.call_at(begin_s + fault.at_s, world.begin, fault)
    clients = zip(CLIENT_NAMES, schedule.routers, schedule.requests, strict=False)
    found = await asyncio.gather(*(world.client(*each) for each in clients))
    for fault in list(world.lasting):
        world.end(fault)
    left = await world.settled()
    outcomes = [each for of_client in found for each in of_client]
    return ScheduleRun(outcomes, [*loop.problems, *said, *left], world.network.events, loop.now_s - begin_s)
