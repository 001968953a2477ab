"""A deployment in virtual time: the real hosts, routers and clients on a network in memory, and a schedule in it."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import Process, VirtualLoop, virtual_time
from loadtest.simulation.releases import TinyRelease, VirtualLoader, held
from loadtest.simulation.schedule import CLIENT_NAMES, HOSTS, REPLICAS, ROUTER_NAMES, Asked, FaultyWorld, Schedule
from loadtest.simulation.served import MemoryServer
from loadtest.simulation.training import Training, TrainingWorld, train
from serving.cli.deploy import deploying
from serving.client.client import AsyncClient, RequestRefused, Result, RouterError
from serving.router.active_release import ActiveRelease
from serving.router.admission import Admission
from serving.router.paths import SUSPECT_S, HostLink
from serving.router.ring import Ring, RingView
from serving.router.rollout import Rollout
from serving.router.server import first_release
from serving.router.service import RouterService
from serving.router.settings import RingSettings
from serving.router.topology import HostEntry, Topology
from serving.v1 import router_pb2_grpc
from stages.checkpoint.release_store import ReleaseStore
from stages.host.host import Host
from stages.host.loading import Sources
from stages.host.next_hosts import NextHosts
from stages.host.parts import MODEL_KINDS, Release, full_state_bytes, wiring_problem
from stages.host.server import RETRY_S, housekeeping
from stages.host.service import StageService
from stages.host.settings import HostSettings
from stages.v1 import stage_pb2_grpc
from stages.wire import channel
from stages.wire.status import DecodeErrors
from stages.wire.tls import Security
from stages.wire.tokens import Keyring

PASS_S = 0.002  # virtual time of a pass
# Seldom enough to be cheap: each message on an idle link is real work for the machine that simulates it.
KEEP_WARM_S = 0.5
PATIENCE_S, HURRY_S, LEAVE_S = 60.0, 0.2, 0.15
READY_S, SETTLE_S = 10.0, 2.0  # a lease is longer: no session may be left to it
MODES = ("sweep", "chunked", "ar", "ar-speculative")
PROMPTS = ("The sea was calm. ", "Nobody saw it again, ", "A ship, ", "It was late in the year, and cold. " * 6)
# Few steps, and several sweeps a text: most of the time of a schedule is arithmetic.
SETTINGS = {"sweep": {"steps": 1}, "chunked": {"steps": 1, "chunk": 4}}
SECURITY = Security(insecure=True)
KNOWN_S = 0.1  # a result's usual time, as routers know it


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


QUIET_S = SUSPECT_S + 0.5  # until no link is avoided for what happened on it
AFTER = Asked(0, 0.0), Asked(8, 0.0)  # of each router, once all is well again


class Weights:
    """Two releases with the outcome of every case, and a training."""

    def __init__(self, directory: Path) -> None:
        """:param directory: for their files."""
        torch.set_num_threads(1)
        self.releases = [TinyRelease.made(directory / name, seed) for seed, name in enumerate(("before", "after"))]
        self.training = Training.made(directory / "training")
        self.topology = Topology(
            tuple(
                HostEntry(name, f"10.0.0.{i + 1}:7701", (i // REPLICAS,), f"10.0.0.{i + 1}:7701")
                for i, name in enumerate(HOSTS)
            )
        )

    @cached_property
    def answers(self) -> list[tuple[RequestOutcome, ...]]:
        """The outcome of each case by each release without faults, one request after the other."""
        requests = (tuple(Asked(case, 0.0) for case in range(len(CASES))),)
        plain, found = Schedule(-1, requests, (ROUTER_NAMES[:1],), ()), []
        for release in self.releases:
            run = run_schedule(self, plain, release)
            assert all(each.status == "OK" and not each.replays for each in run.outcomes), run
            found.append(run.outcomes)
        return list(zip(*found, strict=True))


@dataclass(frozen=True)
class RequestOutcome:
    """A request, as its client saw it."""

    case: int
    status: str  # OK, LEFT where the client went, or a status of gRPC
    text: bytes
    begun_s: float  # since the first request
    took_s: float
    patience_s: float
    replays: int  # times that the work was moved to other hosts, or to another router
    passes: int  # that hosts made meanwhile, for whomever
    said: str = ""


@dataclass(frozen=True)
class ScheduleRun:
    """The outcome of one schedule."""

    outcomes: list[RequestOutcome]
    after: list[RequestOutcome]  # of requests once all faults are over
    passes: int  # that hosts made
    deploy: str | None  # why the deployment failed; empty where it did not, None where there was none
    problems: list[str]  # what no run may have, beside texts
    events: int  # a digest of all that was sent
    seconds: float  # of virtual time


class SimulatedHost(Host):
    """A host whose passes take a fixed virtual time, on the event loop."""

    pass_s, passes = PASS_S, 0
    _has_pass = False

    def _go(self) -> None:
        if not self._has_pass and len(self.scheduler):
            self._has_pass = True
            asyncio.get_running_loop().call_later(self.pass_s, self._pass)

    def _pass(self) -> None:
        self._has_pass, self.passes = False, self.passes + 1
        self._finish(self.scheduler.turn())
        self._go()


class World(FaultyWorld):
    """The processes of one schedule, by name."""

    def __init__(self, loop: VirtualLoop, weights: Weights, first: TinyRelease, stores: Path | None) -> None:
        """:param first: what is served; stores: where each process keeps releases, if any is to be deployed."""
        super().__init__(loop)
        self.weights = weights
        self.first, self.stores, self.open_stores = first, stores, dict[str, ReleaseStore]()
        self.hosts: dict[str, SimulatedHost] = {}
        self.all_hosts: list[SimulatedHost] = []  # also those that were killed
        self.rings: dict[str, Ring] = {}
        self.rollouts: dict[str, Rollout] = {}
        for entry in weights.topology.hosts:
            self.network.places[entry.address] = entry.name
        self.begin_s = 0.0  # of the first request
        self.addresses = {name: f"10.0.1.{i + 1}:7700" for i, name in enumerate(ROUTER_NAMES)}

    def start(self, name: str) -> None:
        """Start a process on the machine of that name."""
        process = self.new_process(name)
        process.context.run(self._start_router if name in ROUTER_NAMES else self._start_host, process, name)

    def _start_host(self, process: Process, name: str) -> None:
        entry, known = self.weights.topology.host(name), self.weights.releases
        sources = Sources(self.first.directory, entry.blocks, self._store(name))
        starts = sources.start() if self.stores else [Release("", self.first.parts[entry.blocks[0]].plan)]
        for each in starts:
            each.parts = held(known, each.plan)
        plan, settings = starts[-1].plan, HostSettings(name, keep_warm_s=KEEP_WARM_S, prefix_mb=1)
        links = NextHosts(
            lambda address, other: wiring_problem([each.plan for each in host.releases.all], address, other),
            *(full_state_bytes(plan), plan.message_bytes(), settings.hop_timeout_s, settings.keep_warm_s),
            security=SECURITY,
        )
        host = self.hosts[name] = SimulatedHost(starts[-1], settings, links)
        host.releases.all = starts
        self.all_hosts.append(host)
        loader = VirtualLoader(host, sources, self.first.backend, plan.message_bytes())
        loader.known = known
        service = StageService(host, loader)
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
        for kind in MODEL_KINDS:  # it has served: one that knows no usual time waits longer for the first result
            ring.hedging.record(kind, KNOWN_S)
        store = self._store(name)
        active = first_release(ring, store, self.first.directory) if store and store.in_use else None
        active = active or ActiveRelease.over(RingView(ring), self.first.router)
        rollout = self.rollouts[name] = Rollout(ring, active, store, self.first.directory)
        service = RouterService(rollout, Keyring(), Admission(), ring.settings.hop_timeout_s)
        server: Any = MemoryServer(self.network, [DecodeErrors()])
        router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
        server.listen(self.addresses[name])
        process.start(ring.open())
        process.start(ring.watch())
        process.start(rollout.keep_up_to_date())

    def _store(self, name: str) -> ReleaseStore | None:
        """The releases on a process's disk; the process before it is gone."""
        if self.stores is None:
            return None
        if name in self.open_stores:
            self.open_stores.pop(name).close()
        store = self.open_stores[name] = ReleaseStore(self.stores / name)
        return store

    def close(self) -> None:
        for store in self.open_stores.values():
            store.close()

    async def open(self) -> None:
        """Start all, and wait until every router has a way through every host."""
        for name in (*HOSTS, *ROUTER_NAMES):
            self.start(name)
        await self.whole()

    async def whole(self) -> None:
        """Return once every router reaches every host, and those each other. Raises TimeoutError."""
        async with asyncio.timeout(READY_S):
            while not all(ring.links and not any(map(_problem_of, ring.links)) for ring in self.rings.values()):
                await asyncio.sleep(RETRY_S)

    async def settled(self) -> list[str]:
        """Wait until no session is open; what is left after a while is a problem each."""
        due = self.loop.now_s + SETTLE_S
        while left := [name for name, host in self.hosts.items() if host.sessions.sessions]:
            if self.loop.now_s > due:
                return [f"{name} still holds sessions" for name in left]
            await asyncio.sleep(RETRY_S)
        return []

    def slow(self, name: str, times: float) -> None:
        self.hosts[name].pass_s = PASS_S * times

    async def deploy(self) -> str:
        """Have all routers exchange the release that they serve for the other; why that failed, or nothing."""
        process = self.new_process("operator")
        addresses, contents = ",".join(self.addresses.values()), self.weights.releases[-1].contents
        client = partial(AsyncClient, addresses, token="", insecure=True)
        try:
            await process.start(deploying(client, contents, (), lambda line: None, PATIENCE_S))
        except (RequestRefused, RouterError) as error:
            return str(error)
        return ""

    async def client(self, name: str, routers: Sequence[str], requests: Sequence[Asked]) -> list[RequestOutcome]:
        """A client's requests, one after the other."""
        process = self.new_process(name)
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
        case, text, status, said, replays = CASES[number], b"", "OK", "", 0
        begin_s, passes = self.loop.now_s, self.passes
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
        took_s, passes = self.loop.now_s - begin_s, self.passes - passes
        return RequestOutcome(number, status, text, begin_s - self.begin_s, took_s, patience_s, replays, passes, said)

    @property
    def passes(self) -> int:
        """Passes that all hosts made."""
        return sum(host.passes for host in self.all_hosts)


def _problem_of(link: HostLink) -> str:
    """A host's problem, or one of the links that it names."""
    links = link.info.links if link.info else ()
    return link.problem or next((each.problem for each in links if each.problem), "")


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


def run_schedule(weights: Weights, schedule: Schedule, first: TinyRelease | None = None) -> ScheduleRun:
    """Run a schedule from its start to its end, in virtual time. Deterministic.

    :param first: what is served; the first of the weights' releases, where none is given."""
    with ExitStack() as stack:
        said, loop = stack.enter_context(_quiet()), stack.enter_context(virtual_time())
        directory: Path | None = None
        if schedule.trains or schedule.deploy_at_s is not None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onesweep-disks-")))
        world: World | TrainingWorld
        if schedule.trains:
            assert directory is not None
            world = TrainingWorld(loop, weights.training, directory)
            job = _train(world, schedule, said)
        else:
            world = World(loop, weights, first or weights.releases[0], directory)
            job = _run(world, schedule, said)
        connect: Any = partial(MemoryChannel, world.network)
        before, channel.connect = channel.connect, connect
        try:
            return loop.run_until_complete(job)
        except (RuntimeError, TimeoutError) as error:
            return ScheduleRun([], [], 0, None, [f"it came to no end: {error!r}"], world.network.events, loop.now_s)
        finally:
            channel.connect = before
            world.close()


async def _train(world: TrainingWorld, schedule: Schedule, said: list[str]) -> ScheduleRun:
    begin_s, problems = world.loop.now_s, await train(world, schedule)
    problems += [*world.loop.problems, *said]
    return ScheduleRun([], [], 0, None, problems, world.network.events, world.loop.now_s - begin_s)


async def _run(world: World, schedule: Schedule, said: list[str]) -> ScheduleRun:
    loop = world.loop
    await world.open()
    begin_s = world.begin_s = loop.now_s
    for fault in schedule.faults:
        loop.call_at(begin_s + fault.at_s, world.begin, fault)
    clients = zip(CLIENT_NAMES, schedule.routers, schedule.requests, strict=False)
    deployed = asyncio.ensure_future(_deployed(world, schedule.deploy_at_s))
    found = await asyncio.gather(*(world.client(*each) for each in clients))
    failure = await deployed
    world.end_all()
    left = await world.settled()
    passes, taken_s = world.passes, loop.now_s - begin_s
    await asyncio.sleep(QUIET_S)
    await world.whole()
    if failure is not None and (again := await world.deploy()):
        left.append(f"it cannot be deployed once all is well: {again}; before: {failure}")
    pairs = zip(ROUTER_NAMES, AFTER, strict=True)
    after = [await world.client(f"after-{name}", [name], [asked]) for name, asked in pairs]
    outcomes, later = ([each for of_client in some for each in of_client] for some in (found, after))
    return ScheduleRun(outcomes, later, passes, failure, [*loop.problems, *said, *left], world.network.events, taken_s)


async def _deployed(world: World, at_s: float | None) -> str | None:
    """Deploy at that time; None where nothing is to be."""
    if at_s is None:
        return None
    await asyncio.sleep(at_s)
    return await world.deploy()
