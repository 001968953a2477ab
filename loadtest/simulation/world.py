"""A deployment in virtual time: real hosts, routers and clients on a network in memory, under a schedule."""

import asyncio
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from loadtest.simulation.loop import CALLER, Process, VirtualLoop
from loadtest.simulation.network import FaultyWorld
from loadtest.simulation.processes import SimulatedHost, TinyRelease, Try, VirtualLoader, WatchedRing, held
from loadtest.simulation.schedule import AHEAD_S, HOSTS, ROUTER_NAMES, Asked, PlannedFault, Schedule
from loadtest.simulation.served import MemoryServer
from loadtest.workload.prompts import SeededRequest
from serving.cli.deploy import deploying
from serving.client.client import AsyncClient, RequestRefused, Result, RouterError
from serving.router.admission import Admission
from serving.router.audit import Auditor
from serving.router.paths import Hedging
from serving.router.rollout import Rollout
from serving.router.server import first_release
from serving.router.service import RouterService
from serving.router.settings import RingSettings
from serving.router.topology import Topology
from serving.v1 import router_pb2_grpc
from stages.checkpoint.release_store import ReleaseStore
from stages.host.host import Host
from stages.host.loading import Sources
from stages.host.next_hosts import NextHosts
from stages.host.parts import Release
from stages.host.plan import MODEL_KINDS, full_state_bytes, wiring_problem
from stages.host.server import RETRY_S, housekeeping
from stages.host.service import StageService
from stages.host.settings import HostSettings
from stages.v1 import stage_pb2_grpc
from stages.wire.status import DecodeErrors
from stages.wire.tls import Security
from stages.wire.tokens import Key, Keyring

# Rare enough to be cheap: each message on an idle link is real work for the simulating machine.
KEEP_WARM_S = 0.5
PATIENCE_S, HURRY_S, LEAVE_S = 60.0, 0.2, 0.15
READY_S, SETTLE_S = 30.0, 2.0  # shorter than a lease, since no session may be left to expire
MODES = ("sweep", "chunked", "ar", "ar-speculative", "resample")
PROMPTS = ("The sea was calm. ", "Nobody saw it again, ", "A ship, ", "It was late in the year, and cold. " * 6)
# Few steps, and several sweeps per text: most of a schedule's time is computation.
SETTINGS: dict[str, dict[str, Any]] = {
    "sweep": {"steps": 1},
    "chunked": {"steps": 1, "chunk": 4},
    "resample": {"candidates": 4, "chunk": 4, "codec": "fp32"},
}
SECURITY = Security(insecure=True)
USUAL_S = 0.2  # a result's usual time, which routers start with
BYTES_PER_DAY = 400  # enough for some requests, in schedules with a wrong date


@dataclass(frozen=True)
class Case(SeededRequest):
    """A request to the simulated deployment."""

    settings: Mapping[str, Any] = field(default_factory=dict)


CASES = tuple(
    Case(prompt, 100 + i, mode, 8 + 4 * i, SETTINGS.get(mode, {}))
    for mode in MODES
    for i, prompt in enumerate(PROMPTS)  # in all modes, each text with another length
)
CASES += tuple(Case(prompt, 200, "ar", 8, {"logprobs": 1, "score_prompt": True}) for prompt in PROMPTS[2:])
# Pictures, with a class as prompt, of a size that a router has a usual time for.
DRAWINGS = tuple(
    Case(name, 100 + i, mode, 0, {"levels": 4, "pictures": 2, "codec": codec})
    for i, (mode, codec) in enumerate((("chain", "int8"), ("chain", "fp32"), ("steps", "int8"), ("steps", "fp32")))
    for name in ("zero", "one")
)
PACES = *MODEL_KINDS, "pictures by chain, 2^4", "pictures by steps, 2^4"


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request on the client's side."""

    case: int  # of CASES, and DRAWINGS after them
    status: str  # OK, LEFT if the client left, or a gRPC status
    text: bytes  # or pixels
    begun_s: float  # since the first request
    took_s: float
    patience_s: float
    replays: int  # moves to other hosts or another router
    places: frozenset[str] = frozenset()  # machines that may have contributed
    idle: frozenset[str] = frozenset()  # routers known to the client that began nothing for it
    extra: frozenset[Any] = frozenset()  # further results that must not differ
    message: str = ""
    mode: str = ""
    previews: frozenset[tuple[int | None, bytes]] = frozenset()  # (block, pixels)


@dataclass(frozen=True)
class ScheduleRun:
    outcomes: list[RequestOutcome]
    after: list[RequestOutcome]  # of requests once all faults are over
    deploy: str | None  # why the deployment failed; empty if it did not, None without one
    problems: list[str]  # failures other than texts
    events: int  # a digest of everything sent


class World(FaultyWorld):
    """The processes of one schedule, by name."""

    def __init__(
        self, loop: VirtualLoop, topology: Topology, releases: Sequence[TinyRelease], schedule: Schedule, disks: Path
    ) -> None:
        """:param releases: the first is served. :param disks: each process's release store, if one is deployed."""
        super().__init__(loop)
        self.second_tries, self.draws = schedule.second_tries, schedule.draws
        # Hosts that lie at some time: with any, all answers are audited.
        self.liars = {fault.targets[0] for fault in schedule.faults if fault.kind == "lie"}
        self.admissions = dict[str, Admission]()
        has_quota = any(fault.kind in AHEAD_S for fault in schedule.faults)
        self.key = Key("anybody", bytes_per_day=BYTES_PER_DAY if has_quota else None)
        self.topology, self.releases, self.first = topology, releases, releases[0]
        self.stores, self.open_stores = disks if schedule.deploy_at_s is not None else None, dict[str, ReleaseStore]()
        self.hosts: dict[str, SimulatedHost] = {}
        self.rings: dict[str, WatchedRing] = {}
        self.all_rings: list[WatchedRing] = []
        self.last_tries = list[Try]()  # last tries of requests with complete text
        self.rollouts: dict[str, Rollout] = {}
        self.entries = {entry.name: entry for entry in topology.hosts}
        self.network.places |= {entry.address: entry.name for entry in topology.hosts}
        self.begin_s = 0.0  # of the first request
        self.addresses = {name: f"10.0.1.{i + 1}:7700" for i, name in enumerate(ROUTER_NAMES)}

    def start(self, name: str) -> None:
        process = self.new_process(name)
        process.context.run(self._start_router if name in ROUTER_NAMES else self._start_host, process, name)

    def _start_host(self, process: Process, name: str) -> None:
        entry, known = self.entries[name], self.releases
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
        host.is_liar = lambda: ("lie", name) in self.network.states
        host.problems = self.loop.problems
        host.releases.all = starts
        loader = VirtualLoader(host, sources, self.first.backend, plan.message_bytes())
        loader.known, loader.on_load = known, self._check_store
        service = StageService(host, loader)
        links.set_addresses(self.topology.successors(entry))
        server: Any = MemoryServer(self.network, [DecodeErrors()], plan.message_bytes())
        stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        server.listen(entry.address)
        process.start(_keep_ready(host, service))
        process.start(housekeeping(host))

    def _start_router(self, process: Process, name: str) -> None:
        settings = RingSettings(keep_warm_s=KEEP_WARM_S)
        ring = WatchedRing(name, self.hit, self.loop.problems, settings=settings, security=SECURITY)
        if self.liars:
            ring.auditor = Auditor(ring, 1.0, self.first.verifier, seed=0)
        self.rings[name] = ring
        self.all_rings.append(ring)
        ring.hedging = Hedging(self.second_tries)
        for kind, what in product(PACES, ("", " candidates", " more candidates")):
            ring.hedging.record(kind + what, USUAL_S)  # as if it had served: with no usual time it waits longer
        store = self._store(name)
        active = first_release(ring, store, self.first.directory, lambda: self.first.router)
        rollout = self.rollouts[name] = Rollout(ring, active, store, self.first.directory)
        keyring, self.admissions[name] = Keyring(), Admission()
        keyring.identify = lambda *_: self.key  # type: ignore[method-assign]
        service = RouterService(rollout, keyring, self.admissions[name])
        server: Any = MemoryServer(self.network, [DecodeErrors()])
        router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
        server.listen(self.addresses[name])
        ring.set_hosts(self.topology.hosts)
        process.start(ring.watch())
        process.start(rollout.keep_up_to_date())

    def _store(self, name: str) -> ReleaseStore | None:
        """The releases on a process's disk; its previous process is gone."""
        if self.stores is None:
            return None
        if name in self.open_stores:
            self.open_stores.pop(name).close()
        store = self.open_stores[name] = ReleaseStore(self.stores / name)
        for what in ("begin", "use"):
            setattr(store, what, partial(self.write, name, getattr(store, what)))
        return store

    def close(self) -> None:
        for store in self.open_stores.values():
            store.close()

    async def wait_until_ready(self) -> None:
        """Wait until every router reaches every host, and hosts reach each other. Raises TimeoutError."""
        async with asyncio.timeout(READY_S):
            while not all(map(self._is_ready, self.rings)):
                await asyncio.sleep(RETRY_S)

    def _is_ready(self, name: str) -> bool:
        """True if a router reaches every host, each holds the served release, and the router's disk records it."""
        links, current, store = self.rings[name].links, self.rollouts[name].current, self.open_stores.get(name)
        links = [link for link in links if not link.quarantined]
        if not links or any(link.problem or current.view.weights not in link.held for link in links):
            return False
        if any(each.problem for link in links for each in link.onward.values()):
            return False
        return store is None or not store.in_use or store.in_use[-1] == current.release

    def _check_store(self) -> None:
        """Record moments when a router has a host load a release before its disk says which one it serves."""
        store = self.open_stores.get(CALLER.get())  # none: the router lost its power since
        if store is not None and not store.in_use:
            self.loop.problems.append(f"{CALLER.get()} would not know after a restart what it served")

    def release_states(self) -> dict[str, tuple[Any, ...]]:
        """Releases that each process serves and has on disk."""
        new, states = self.releases[-1].contents.name, dict[str, tuple[Any, ...]]()
        for name, store in self.open_stores.items():
            held: tuple[Any, ...] = tuple(r.name for r in self.hosts[name].releases.all) if name in self.hosts else ()
            if (rollout := self.rollouts.get(name)) is not None:
                current = rollout.current
                held = current.release, current.view.pinned, rollout.previous_name, tuple(store.in_use)
            states[name] = *held, store.path(new)
        return states

    def changed_by_failure(self, before: dict[str, tuple[Any, ...]]) -> list[str]:
        """Traces of a failed deployment on processes without a fault."""
        after = self.release_states()
        # nothing cleans up after a lost router: releases that it made hosts load stay until the next deployment
        sound = before.keys() - self.hit if self.hit.isdisjoint(ROUTER_NAMES) else set(ROUTER_NAMES) - self.hit
        changed = [name for name in before if name in sound and before[name] != after[name]]
        return [f"a failed deployment changed {name} from {before[name]} to {after[name]}" for name in changed]

    async def wait_until_idle(self) -> list[str]:
        """Wait until no session is open; each one left after a while is a problem."""
        due_s = self.loop.now_s + SETTLE_S
        while self.loop.now_s < due_s and any(host.sessions.sessions for host in self.hosts.values()):
            await asyncio.sleep(RETRY_S)
        used = {name: sum(each.bytes_today for each in at._usage.values()) for name, at in self.admissions.items()}
        problems = [
            f"{name} counts {count} bytes for the day"
            for name, count in used.items()
            if not 0 <= count <= (self.key.bytes_per_day or count)
        ]
        quarantined = {link.entry.name for ring in self.all_rings for link in ring.links if link.quarantined}
        return [*problems, *leftovers(self), *(f"{name} is quarantined as a liar" for name in quarantined - self.liars)]

    def change(self, fault: PlannedFault, begins: bool) -> None:
        if fault.kind == "move":
            self._move(fault.targets[0], is_back=not begins)
        elif fault.targets[0] in self.hosts:
            self.hosts[fault.targets[0]].change(fault, begins)
        if fault.kind in ("power", "replace") and (store := self.open_stores.pop(fault.targets[0], None)):
            store.close()
            shutil.rmtree(store.directory) if fault.kind == "replace" else self.cut_power(store.directory)

    def _move(self, name: str, is_back: bool) -> None:
        """Drop a host from the topology, or give it another address: each process reads that within a second."""
        if is_back:
            self.network.kill(self.processes[name])
            address = f"10.0.3.{HOSTS.index(name) + 1}:7701"
            self.entries[name], self.network.places[address] = replace(self.entries[name], address=address), name
            self.start(name)
        hosts = tuple(entry for entry in self.entries.values() if is_back or entry.name != name)
        self.topology = replace(self.topology, hosts=hosts)
        follow = {at: partial(ring.set_hosts, hosts) for at, ring in self.rings.items()}
        for at in (entry for entry in hosts if entry.name != name):
            follow[at.name] = partial(self.hosts[at.name].next_hosts.set_addresses, self.topology.successors(at))
        for process, call in ((self.processes[at], call) for at, call in follow.items()):
            process.call_at(self.loop.now_s + process.ahead_s % 1000 / 1000, call)

    async def deploy(self, after_s: float | None) -> str | None:
        """Switch all routers to the other release; returns why that failed, or an empty text.

        :param after_s: seconds from now; None: no deployment."""
        if after_s is None:
            return None
        await asyncio.sleep(after_s)
        process = self.new_process("operator")
        addresses, contents = ",".join(self.addresses.values()), self.releases[-1].contents
        client = partial(AsyncClient, addresses, token="", insecure=True)
        try:
            await process.start(deploying(client, contents, (), lambda line: None, PATIENCE_S))
        except (RequestRefused, RouterError) as error:
            return str(error)
        return ""

    async def client(self, name: str, routers: Sequence[str], requests: Sequence[Asked]) -> list[RequestOutcome]:
        """Make a client's requests, one after the other."""
        process = self.new_process(name)
        addresses = ",".join(self.addresses[router] for router in routers)
        client = process.context.run(partial(AsyncClient, addresses, token="", insecure=True))
        outcomes = []
        for request in requests:
            await asyncio.sleep(request.pause_s)
            lasting = {fault.kind for fault in self.lasting if fault.targets == (name,)}
            patience_s = HURRY_S if "hurry" in lasting else PATIENCE_S
            number = len(CASES) + request.case % len(DRAWINGS) if self.draws else request.case
            task = process.start(self._ask(name, routers, client, number, patience_s))
            if "leave" in lasting:
                self.loop.call_later(LEAVE_S, task.cancel)
            outcomes.append(await task)
        return outcomes

    async def _ask(
        self, name: str, routers: Sequence[str], client: AsyncClient, number: int, patience_s: float
    ) -> RequestOutcome:
        case, text, status, message, replays = (*CASES, *DRAWINGS)[number], b"", "OK", "", 0
        begin_s = self.loop.now_s
        settings: Any = {"mode": case.mode, "seed": case.seed, "timeout_s": patience_s, **case.settings}
        extra, previews = list[Any](), set[tuple[int | None, bytes]]()
        try:
            if self.draws:
                if case.mode == "chain":
                    settings["preview"] = lambda shown: previews.add((shown.block, shown.pixels.tobytes()))
                drawn = await client.draw(case.prompt, **settings)
                text, replays, extra = drawn.pixels.tobytes(), drawn.replays, [drawn.levels, drawn.solver]
            else:
                async for item in client.events(case.prompt, max_bytes=case.max_bytes, **settings):
                    if isinstance(item, Result):
                        replays = item.replays
                        extra += [item.prompt_tokens, item.output_tokens, item.effective_samples, item.divergence_bits]
                    elif isinstance(item, bytes):
                        text += item
                    elif isinstance(item, list):  # a prompt's first token has no probability
                        extra += [(each.text, each.logprob) for each in item if not math.isnan(each.logprob)]
        except asyncio.CancelledError:
            status = "LEFT"
        except (RequestRefused, RouterError) as error:
            status, message = error.code.name, str(error)
        took_s = self.loop.now_s - begin_s
        own, places, idle = traces_of(self.all_rings, name, routers, begin_s, routers[client.first])
        if status == "OK":
            self.last_tries.append(max(own, key=lambda each: each.heard_s))
            extra += [score for each in own for score in each.scores.items()]
        took = begin_s - self.begin_s, took_s, patience_s
        seen, shown = frozenset(extra), frozenset(previews)
        return RequestOutcome(number, status, text, *took, replays, places, idle, seen, message, case.mode, shown)


def traces_of(
    rings: Sequence[WatchedRing], client: str, routers: Sequence[str], begin_s: float, answered: str
) -> tuple[list[Try], frozenset[str], frozenset[str]]:
    """A request's tries at the router that answered, the machines that may have contributed, and those of its routers
    that began no try."""
    tries = [each for ring in rings for each in ring.tries.values()]
    tries = [each for each in tries if each.client == client and each.begun_s >= begin_s]
    places = frozenset({client, *routers, *(host for each in tries for host in each.path)})
    own = [each for each in tries if each.router == answered]
    return own, places, frozenset({*routers} - {each.router for each in tries})


def leftovers(world: Any) -> list[str]:  # noqa: ANN401
    """A sentence for each host with a session newer than the host, and for each request with complete text whose hosts
    generated more. An older session arrived late over a cut link, and ends with its lease."""
    begun_s = {name: each.begun_s for ring in world.all_rings for name, each in ring.tries.items()}
    held = [(name, each) for name, host in world.hosts.items() for each in host.sessions.sessions]
    left = {name for name, each in held if begun_s.get(each, math.inf) > world.processes[name].begun_s}
    beyond = [f"{' - '.join(each.path)} wrote beyond the end of a request" for each in world.last_tries if each.beyond]
    return [*(f"{name} still holds sessions" for name in sorted(left)), *beyond]


async def _keep_ready(host: Host, service: StageService) -> None:
    while True:
        service.not_ready_reason = host.next_hosts.problem
        await asyncio.sleep(RETRY_S)
