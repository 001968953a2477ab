"""The ring of joined machines: measures them, divides the model, delivers stages, and changes while it serves."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc.aio

from serving.cli.deploy import read_release
from serving.cli.deployment import NO_HOLDER, Deployment
from serving.cli.servers import RELEASES, ROUTER, TOPOLOGY
from serving.router.host_link import HostLink
from serving.router.placement import ROUTER_END, Span, placed, ring_order
from serving.router.rollout import LOAD_S, load, send
from serving.router.topology import HostEntry, Topology, local_topology
from stages.checkpoint.files import replace_file
from stages.checkpoint.release_store import CURRENT_NAME, ReleaseManifest, release_files
from stages.clock import monotonic
from stages.errors import InputError, OnesweepError, ServiceError
from stages.host.plan import plan_host
from stages.importing.cut import MEGABYTE, StageHost
from stages.progress import ProgressLine
from stages.signals import run_interruptible
from stages.threads import cancelled
from stages.v1 import stage_pb2
from stages.wire.link_quality import EXCHANGES, PROBE_TIMEOUT_S
from stages.wire.links import link_address
from stages.wire.rendezvous import Rendezvous, RunDirectory
from stages.wire.status import StatusError, failed_precondition, unavailable
from stages.wire.tls import Security

ANSWER_S = 10.0  # for the answer to Describe
POLL_S = 0.2
GONE_S = 60.0  # absence after which others take a machine's blocks; one that announces its end is gone at once
RETRY_S = 30.0  # pause before a failed change of the ring is tried again
ORDER_NAME = "order.json"  # file in a run's directory with the machines of its last ring


class MachineRing:
    """The blocks of each machine of a run, and the steps to change them. Its rendezvous runs on another thread."""

    def __init__(self, rendezvous: Rendezvous, nobody: Topology, progress: ProgressLine) -> None:
        """:param nobody: gives the router and the run's certificates; its hosts are ignored."""
        self.rendezvous, self.topology, self.progress = rendezvous, nobody, progress
        self.security = Security(rendezvous.run.tls)
        self.rooms = dict[str, StageHost]()  # machines that answered
        self.trips_ms = dict[tuple[str, str], float]()
        self.contents = ReleaseManifest({})
        self.sizes = list[int]()  # bytes per block
        self._seen = dict[str, float]()  # when each machine was last present, by the monotonic clock
        self._settled: object = None  # the machines of the current ring
        self._failed: object = None  # the machines with which the last change failed
        self._retry_at, self._reported = 0.0, set[str]()

    async def ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """Machines in ring order, by the delays that they measure. Raises ServiceError that names those that do not
        answer or cannot hold a stage."""
        self.progress.at(f"asking {len(names)} machines for their memory, speed and delays")
        before = last_order(self.rendezvous.run)
        names = before if sorted(before) == sorted(names) else names
        self.rendezvous.neighbours = {name: {*names} - {name} for name in names}
        self.rendezvous.announces = False  # most of these links only serve to measure
        async with _links(map(_entry, names), self.security) as links:
            await self._describe(links)
            await asyncio.gather(*(self._measure(link, names) for link in links))
        self.rendezvous.announces = True
        order = ring_order(names, self.trips_ms)
        (self.rendezvous.run.directory / ORDER_NAME).write_text(json.dumps(order), encoding="utf-8")
        return order

    async def _describe(self, links: Iterable[HostLink]) -> None:
        outcomes = await asyncio.gather(*map(_room, links), return_exceptions=True)
        if problems := [str(outcome) for outcome in outcomes if isinstance(outcome, StatusError)]:
            raise ServiceError(f"{'; '.join(problems)}; each must run `onesweep join`")
        self.rooms |= {room.name: room for room in outcomes if isinstance(room, StageHost)}

    async def _measure(self, link: HostLink, names: Iterable[str]) -> None:
        """Record a machine's delays to the others and the router; omits those that cannot be measured."""
        own, others = link.entry.name, {link_address(name): name for name in names if name != link.entry.name}
        with suppress(StatusError, grpc.aio.AioRpcError):
            for _ in range(EXCHANGES):
                await link.relay.warm(0)
            to_router = (link.relay.min_rtt_ms or 0.0) / 2
            self.trips_ms[own, ROUTER_END] = self.trips_ms[ROUTER_END, own] = to_router
            measured = await link.relay.stub.Probe(stage_pb2.ProbeRequest(to=others), timeout=2 * PROBE_TIMEOUT_S)
            trips = {(own, others[each.address]): each.rtt_min_ms / 2 for each in measured.links if not each.problem}
            self.trips_ms |= trips

    def plan(self, checkpoint: Path, parts: int, names: Sequence[str]) -> None:
        """Divide a checkpoint among machines, in their order, and show the result. Raises InputError if one has too
        little memory."""
        self._hold(read_release(checkpoint), parts)
        shares = local_topology(min(len(names), parts), parts, checkpoint).hosts
        self.topology = self._topology({name: share.blocks for name, share in zip(names, shares, strict=False)})
        self.rendezvous.neighbours = _neighbours(self.topology)
        ar = plan_host(checkpoint, (0,)).models.get("ar")
        layers = ar.manifest.text_architecture.layers if ar else None
        self.progress.say("the ring, in this order:")
        for line in self._plan_lines(layers if isinstance(layers, tuple) else None):
            self.progress.say(line)
        for host in self.topology.hosts:
            if (missing := self._bytes(host.blocks) - self.rooms[host.name].memory_bytes) > 0:
                raise InputError(
                    f"{host.name} has too little memory: {missing / MEGABYTE:,.1f} MB are missing; free some there, "
                    f"add a machine, or split the model again ({checkpoint} holds its parts)"
                )

    def _plan_lines(self, layers: Sequence[int] | None) -> Iterator[str]:
        names = {host.address: host.name for host in self.topology.hosts}
        fastest, kinds = max(self.rooms[name].speed for name in names.values()), self.rendezvous.kinds
        for number, host in enumerate(self.topology.hosts, 1):
            room, what = self.rooms[host.name], f"blocks {host.span}"
            if layers is not None:
                first = sum(layers[: host.blocks[0]])
                what = f"layers {first}-{first + sum(layers[block] for block in host.blocks) - 1}"
            memory = f"{self._bytes(host.blocks) / MEGABYTE:,.1f} of {room.memory_bytes / MEGABYTE:,.0f} MB"
            words = [f"{what}, {memory}, speed {room.speed / fastest:.2f}"]
            for there in (names[address] for address in self.topology.successors(host)):
                delay_ms = self.trips_ms.get((host.name, there), math.nan)
                words.append(f"to {there}: {kinds.get((host.name, there), 'no link')}, {delay_ms:.1f} ms")
            yield f"{number}. {host.name}: {'; '.join(words)}"

    def supervise(self, deployment: Deployment) -> None:
        """Adapt the ring to the machines that came and went since the last call.

        A failure is printed and the change tried again later; the serving ring is not touched."""
        situation, now = self._situation(), monotonic()
        if situation == self._settled or (now < self._retry_at and situation == self._failed):
            return
        self._look_for_release(deployment)
        there, able = situation
        known = able & {host.name for host in self.topology.hosts}
        self._failed, self._retry_at = situation, now + RETRY_S
        for usable in dict.fromkeys((able, known)):  # a new machine must not keep the others from taking over
            try:
                is_done = run_interruptible(self._until_changed(situation, self._follow(there, usable, deployment)))
                self._settled = situation if is_done and usable == able else None
                if self._settled:  # the same failure another day is news
                    self._reported.clear()
                return
            except OnesweepError as error:
                if (line := f"no ring can be made of {', '.join(sorted(usable))}: {error}") not in self._reported:
                    self._reported.add(line)
                    self.progress.say(line)

    def _situation(self) -> tuple[frozenset[str], frozenset[str]]:
        """Machines that are present, and those that count: the ring's own may be away for a while."""
        there, leaving, now = frozenset(self.rendezvous.present), self.rendezvous.leaving, monotonic()
        self._seen |= dict.fromkeys(there, now)
        held = {host.name for host in self.topology.hosts} & self.rendezvous.machines.keys() - leaving  # of those known
        return there, there | {name for name in held if now - self._seen.get(name, now) < GONE_S}

    async def _until_changed(self, situation: object, job: Coroutine[None, None, None]) -> bool:
        """Run a job on the rendezvous's loop to its end, unless machines come or go meanwhile; True if it ended."""
        task = asyncio.create_task(self.rendezvous.here(job))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=POLL_S)
                if self._situation() != situation and not task.done():
                    return False
            task.result()
            return True
        finally:
            await cancelled([task])

    async def _follow(self, there: Collection[str], able: Collection[str], deployment: Deployment) -> None:
        """Change the ring to one of these machines. Raises ServiceError."""
        held = {host.name: host.blocks for host in self.topology.hosts}
        async with _links(
            (_entry(name) for name in there if name in able and name not in held), self.security
        ) as links:
            await self._describe(links)
            # machines of the previous ring still have their files
            known = {*held.values()}
            held |= {link.entry.name: span for link in links if link.info and (span := (*link.info.blocks,)) in known}
        rooms = {name: room for name, room in self.rooms.items() if name in able}
        spans, missing = placed(held, rooms, self.sizes)
        self._report_missing(missing)
        if missing:
            return  # the router says which host is lost
        topology = self._topology(spans)
        for name in sorted(rooms.keys() - spans.keys()):
            self.progress.say(
                f"{name} is a spare: the smallest part takes {min(map(self._bytes, spans.values())) / MEGABYTE:,.1f} MB"
                f", it has room for {rooms[name].memory_bytes / MEGABYTE:,.1f}"
            )
        if topology != self.topology:
            before, after = (_neighbours(each) for each in (self.topology, topology))
            both = {name: before.get(name, set()) | after.get(name, set()) for name in before | after}
            self.rendezvous.neighbours = both
        await self.bring(topology, [name for name in spans if name in there])
        if topology != self.topology:
            replace_file(deployment.directory / TOPOLOGY, lambda path: path.write_text(topology.to_toml(), "utf-8"))
            self.rendezvous.neighbours, deployment.topology, self.topology = after, topology, topology
            shown = ", ".join(f"{host.name} blocks {host.span}" for host in topology.hosts)
            self.progress.say(f"the ring is now: {shown}")

    def _report_missing(self, missing: Sequence[Span]) -> None:
        """Report the missing blocks, here and in `status`."""
        advice = [
            f"blocks {','.join(map(str, run))} {NO_HOLDER} {self._bytes(run) / MEGABYTE:,.0f} MB free (onesweep invite)"
            for run in missing
        ]
        if advice != self.rendezvous.advice:
            self.rendezvous.advice = advice
            self.rendezvous.write_links()
            for line in advice:
                self.progress.say(line)

    def _look_for_release(self, deployment: Deployment) -> None:
        """From now on deliver the deployed release instead of the first one."""
        store = deployment.directory / RELEASES / ROUTER
        with suppress(OSError, ValueError, LookupError, InputError):
            name = json.loads((store / CURRENT_NAME).read_text(encoding="utf-8"))["releases"][-1]
            if name != self.contents.name:
                self._hold(read_release(store / name), len(self.sizes))

    def _hold(self, contents: ReleaseManifest, parts: int) -> None:
        self.contents = contents

        def size_of(block: int) -> int:
            is_last = block == parts - 1  # the last block's machine drafts with the model in local/
            files = release_files(contents.directories, lambda kind, i: is_last if kind == "local" else i == block)
            return sum(part.bytes for part in files.values())

        self.sizes = [size_of(block) for block in range(parts)]

    def _bytes(self, span: Span) -> int:
        return sum(self.sizes[block] for block in span)

    def _topology(self, spans: Mapping[str, Span]) -> Topology:
        by_block = sorted(spans, key=lambda name: spans[name])
        return replace(self.topology, hosts=tuple(replace(_entry(name), blocks=spans[name]) for name in by_block))

    async def bring(self, topology: Topology, names: Collection[str]) -> None:
        """Have machines load their blocks and send to their next hosts; sends nothing to one that already does.

        Raises ServiceError."""
        name = self.contents.name
        async with _links((host for host in topology.hosts if host.name in names), self.security) as links:
            given = {
                link: stage_pb2.Assignment(blocks=link.entry.blocks, next=topology.successors(link.entry))
                for link in links
            }

            def is_loaded(info: stage_pb2.DescribeResponse) -> bool:
                return name in {each.name for each in info.releases if not each.loading}

            async def brought(link: HostLink) -> None:
                self.progress.at(f"sending {link.entry.name} its stage")
                sent_bytes = await send(link, self.contents, given[link])
                self.progress.say(f"{link.entry.name}: {sent_bytes / MEGABYTE:.1f} MB sent, blocks {link.entry.span}")

            try:
                infos = await asyncio.gather(*(_waited(link, ANSWER_S, lambda info: True) for link in links))
                new = [  # the others have loaded their blocks of the release, or are about to
                    link
                    for link, info in zip(links, infos, strict=True)
                    if (*info.blocks,) != link.entry.blocks or name not in {each.name for each in info.releases}
                ]
                # No machine changes its stage before all have their files, so a failure leaves the old ring.
                await asyncio.gather(*map(brought, new))
                await asyncio.gather(*(_loading(link, name, given[link]) for link in new))
                if new:
                    self.progress.at(f"waiting until {name} is loaded")
                await asyncio.gather(*(_waited(link, LOAD_S, is_loaded) for link in links))
                moved = [link for link in links if {*link.onward} != {*given[link].next}]
                await asyncio.gather(*(_loading(link, "", given[link]) for link in moved))
            except StatusError as refusal:
                raise ServiceError(refusal.message) from None


def _entry(name: str) -> HostEntry:
    return HostEntry(name, link_address(name), (0,), link_address(name))


def last_order(run: RunDirectory) -> list[str]:
    """The machines of a run's last ring; none if it never had one."""
    with suppress(OSError, ValueError):
        return list(json.loads((run.directory / ORDER_NAME).read_text(encoding="utf-8")))
    return []


def nobody(router: str, run: Path) -> Topology:
    """A topology of only the router, with the certificates of a run."""
    return Topology((_entry("nobody"),), router, certificates=run)


def _neighbours(topology: Topology) -> dict[str, set[str]]:
    """The machines that each machine sends work to."""
    by_address = {host.address: host.name for host in topology.hosts}
    return {host.name: {by_address[address] for address in topology.successors(host)} for host in topology.hosts}


@asynccontextmanager
async def _links(hosts: Iterable[HostEntry], security: Security) -> AsyncIterator[list[HostLink]]:
    """Open a link to each host. Raises InputError if one may not be dialled."""
    links: list[HostLink] = []
    try:
        links.extend(HostLink(host, ANSWER_S, security) for host in hosts)
        yield links
    finally:
        await asyncio.gather(*(link.relay.close(0) for link in links))


async def _room(link: HostLink) -> StageHost:
    """Speed and memory of a machine, whose server may be restarting. Raises StatusError."""
    info = await _waited(link, ANSWER_S, lambda info: True)
    if not info.HasField("room") or not 0 < info.room.speed < math.inf:
        raise failed_precondition(f"machine {link.entry.name} has its own checkpoint, or reports an impossible speed")
    return StageHost(info.room.speed, info.room.memory_bytes, link.entry.name)


async def _loading(link: HostLink, release: str, given: stage_pb2.Assignment) -> None:
    """Give a machine its stage or its next hosts, though its server may be restarting. Raises StatusError."""
    deadline = monotonic() + ANSWER_S
    while True:
        try:
            return await load(link, release, (), given)
        except StatusError as refusal:
            if refusal.code is not grpc.StatusCode.UNAVAILABLE or monotonic() > deadline:
                raise
        await asyncio.sleep(POLL_S)


async def _waited(
    link: HostLink, within_s: float, done: Callable[[stage_pb2.DescribeResponse], bool]
) -> stage_pb2.DescribeResponse:
    """Wait until a machine's description is as it should be; returns it. Raises StatusError."""
    deadline = monotonic() + within_s
    while True:
        try:
            await link.describe()
            assert link.info is not None
            if done(link.info):
                return link.info
            problem = unavailable(f"machine {link.entry.name} does not serve its stage: {link.info.not_ready_reason}")
        except StatusError as refusal:  # a machine whose server restarts does not answer for a moment
            problem = refusal
        if monotonic() > deadline or "cannot be served" in problem.message:
            raise problem
        await asyncio.sleep(POLL_S)
