"""The real decisions of clients, routers and hosts under fault schedules, on a scripted model in virtual time:
`python .ci/schedules.py --schedules 10000 --seed 0`, a minute of one processor.

A token is a checksum of the text before it, as each host on its way has read it. No message is serialized, nothing is
computed and no task runs: what asyncio, gRPC and torch do is not simulated, `bench chaos --simulate` does that.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeVar

from scripted_hosts import ENTRIES, RTT_MS, WEIGHTS, ScriptedCall, ScriptedHost, ScriptedRelay, StepTaker, after

import loadtest.simulation.schedule as schedules
import loadtest.simulation.world as simulation
from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import VirtualLoop, here
from loadtest.simulation.network import SMALL_BYTES, FaultyWorld
from loadtest.simulation.processes import Try, WatchedRing
from loadtest.simulation.schedule import HOSTS, ROUTER_NAMES, STAGES, Asked, PlannedFault, Schedule
from loadtest.simulation.search import search
from serving.client.client import RequestRefused, Result, RouterError
from serving.client.failover import Turns
from serving.router.accounting import Account
from serving.router.host_link import HostLink
from serving.router.paths import Hedging
from serving.router.ring import RETRY_S
from serving.router.session import Session, Steps, Wait
from serving.router.topology import HostEntry
from serving.v1 import router_pb2
from stages import clock
from stages.clock import monotonic
from stages.host.plan import ModelKind
from stages.v1 import stage_pb2
from stages.wire.status import Code, StatusError, internal

LENGTHS = {"sweep": 6, "chunked": 6, "ar": 4, "scored": 3}  # of texts
CASES = tuple(simulation.Case(text, 0, mode, most) for mode, most in LENGTHS.items() for text in ("sea ", "a ship, "))
CHUNK = 2  # tokens of a sweep, and of a prompt that are scored together
CHECK_S = 0.2, 1.45, 2.2, 5.5, 10.5, 15.5  # after a fault begins or ends, routers look at their links
ASKED_S, ONWARD_S, LOST_S = 0.25, 2.0, 5.3  # after a link falls silent: it was asked, its host says so, it is lost
READY_S = 0.1  # until routers listen on all hosts
T = TypeVar("T")


# Routers


class ScriptedRing(WatchedRing):
    """A router's ring, whose links do their jobs at once."""

    scripted: Sequence[ScriptedLink]  # its links

    def spawn(self, job: Coroutine[Any, Any, T]) -> Any:  # noqa: ANN401
        with suppress(StopIteration):
            job.send(None)


class ScriptedLink(HostLink):
    """A router's link to a host."""

    is_open = False

    def __init__(self, world: ScriptedWorld, ring: ScriptedRing, entry: HostEntry) -> None:
        relay: Any = ScriptedRelay(world.network, entry.address, ring.settings.hop_timeout_s)
        super().__init__(entry, relay.hop_timeout_s, relay=relay)
        self.world, self.ring, self.parts, self.held = world, ring, len(STAGES), {WEIGHTS: stage_pb2.Release()}
        self.onward = {each.address: stage_pb2.LinkInfo(address=each.address, rtt_ms=RTT_MS) for each in after(entry)}
        self.channel = relay.channel
        self.listen()

    def listen(self) -> None:
        ScriptedCall(self.channel, lambda call: call.connection.serves.listen(self.ring, self.opened, call), self.lost)

    def opened(self) -> None:
        self.is_open, self.problem, unreleased, self._unreleased = True, "", self._unreleased, []
        for session in unreleased:
            self.ring.spawn(self.release(session))

    def lost(self, why: str) -> None:
        self.is_open = False
        self.ring._lose(self, why)
        here().call_at(self.world.loop.now_s + RETRY_S, self.listen)

    async def release(self, session: str | None = None) -> None:
        freed = [session] if session else []

        def free(call: Any) -> None:  # noqa: ANN401
            for each in freed:
                call.connection.serves.sessions.release(each)
            call.end()

        ScriptedCall(self.channel, free, lambda why: self._unreleased.extend(freed))

    def look(self) -> bool:
        """Take note of how the host is, and of those after it. True if it will soon say more."""
        dials, now_s = False, self.world.loop.now_s
        since_s = self.world.silent_since(self.ring.place, self.entry.name)
        self.relay.asked_at = since_s and monotonic() - (now_s - since_s) + ASKED_S
        if since_s is not None and now_s > since_s + LOST_S:
            self.ring._lose(self, "it does not answer")
        elif since_s is None and self.is_open:
            self.problem = ""
            for name, link in self.onward.items():
                since_s = self.world.silent_since(self.entry.name, name)
                is_lost = since_s is not None and now_s > since_s + ONWARD_S
                relay: Any = self.world.hosts[self.entry.name].next_hosts.to(name)
                is_killed = self.world.processes[name].killed
                dials = dials or (relay.channel._dialling and not is_killed)
                link.problem = "lost" if is_lost or is_killed or relay.channel._dialling else ""
        return dials


def serve(case: simulation.Case, left_s: float, hear: Callable[..., object], call: Any) -> None:  # noqa: ANN401
    """Serve a request at a router. :param hear: is called at the client with what comes."""
    due_at = monotonic() + left_s
    kind: ModelKind = "chain" if case.mode in ("sweep", "chunked") else "ar"
    view: Any = SimpleNamespace(ring=call.connection.serves, weights=WEIGHTS, model=lambda kind: None)
    reply = partial(call.connection.answer, SMALL_BYTES, hear, call)

    def steps(taker: StepTaker) -> Steps[None]:
        account, patient_until_s = Account(), min(monotonic() + view.ring.settings.hop_timeout_s, due_at)
        try:
            with Session(view, kind, len(case.prompt) + case.max_bytes, due_at, account) as session:
                session.on_event = taker.hear
                yield from written(session, case, reply)
            reply(router_pb2.Summary(replays=account.replays))
        except StatusError as error:
            if error.code is Code.UNAVAILABLE and monotonic() < patient_until_s:
                view.ring.problems.append(f"{view.ring.place} gives up a request instead of waiting for a path")
            reply(RouterError(error.message, error.code, error.retry_after_ms))

    taker = StepTaker(call.connection.client.place, steps)
    call.cancel, call.connection.served[call] = taker.cancel, None
    here().loop.call_at(due_at, taker.cancel)


def written(session: Session, case: simulation.Case, reply: Callable[[bytes], object]) -> Steps[None]:
    """Write the text of a case, as its mode does."""
    text, left = case.prompt.encode(), case.max_bytes

    def check(due: int, event: stage_pb2.Event) -> None:
        if len(event.text) != due:
            raise internal(f"a step of {due} tokens returned {len(event.text)}")

    for known in range(1, len(text), CHUNK) if case.mode == "scored" else ():
        given = text[known : known + CHUNK]
        sample = stage_pb2.Sample(draft=len(given), given=True)
        yield from session.pushing(stage_pb2.Read(sample=sample), text[:known], given)
        yield from session.result(partial(check, len(given) + 1))
        session.journal.kept = len(given) - 1
    if session.kind == "ar":
        yield from session.pushing(stage_pb2.Read(sample=stage_pb2.Sample(remaining=left)), text)
    while left:
        slots = min({"sweep": left, "chunked": CHUNK}.get(case.mode, 1), left)
        if session.kind == "chain":
            yield from session.pushing(stage_pb2.Sweep(slots=slots), text)
        event = yield from session.result(partial(check, slots))
        text, left = text + event.text, left - slots
        reply(event.text)


# Clients


def ask(
    world: ScriptedWorld, name: str, routers: Sequence[str], asked: Sequence[Asked], taker: StepTaker
) -> Steps[None]:
    """A client's requests, one after the other."""
    client: Any = SimpleNamespace(addresses=routers, first=0)
    channels = [MemoryChannel(world.network, router) for router in routers]
    calls = list[ScriptedCall]()

    def hear(call: ScriptedCall, what: object) -> None:
        if call is calls[-1]:
            taker.hear(what)

    def lost(why: str) -> None:
        taker.hear(RouterError(why, Code.UNAVAILABLE, None if "last error" in why else 250, reached=False))

    for each in asked:
        yield Wait(each.pause_s, until_event=False)
        case, begin_s, replays, status, message, had = CASES[each.case], world.loop.now_s, 0, "", "", 0
        lasting = {fault.kind for fault in world.lasting if fault.targets == (name,)}
        turns = Turns(client, simulation.HURRY_S if "hurry" in lasting else simulation.PATIENCE_S)
        leaves, begun_at = "leave" in lasting, monotonic()
        end_s, end = (simulation.LEAVE_S, "LEFT") if leaves else (turns.timeout_s, "DEADLINE_EXCEEDED")
        while not status:
            yield Wait(turns.pause_s, until_event=False)
            taker.inbox.clear()
            calls.append(call := ScriptedCall(channels[turns.at], partial(serve, case, turns.left_s, hear), lost))
            try:
                while not status:
                    if not taker.inbox:
                        yield Wait(max(begun_at + end_s - monotonic(), 0.0), until_event=True)
                    what = taker.inbox.popleft() if taker.inbox else None
                    if isinstance(what, RouterError):
                        raise what
                    if what is None:
                        status = end
                        break
                    kind = {"text": what} if isinstance(what, bytes) else {"summary": what}
                    for item in turns.read(router_pb2.GenerateResponse(**kind)):
                        if isinstance(item, Result):
                            status, replays = "OK", item.replays
            except RouterError as error:
                is_first, had = len(turns.output) > had or not turns.moves, len(turns.output)
                try:
                    turns.lost(error)
                    if is_first and turns.pause_s and len(routers) > 1 and error.code is Code.UNAVAILABLE:
                        world.loop.problems.append(f"{name} pauses before it tries a router that it has not lost")
                except (RequestRefused, RouterError) as refused:
                    status, message = refused.code.name, str(refused)
            call.end()
            if call.connection is not None:
                call.connection.send(SMALL_BYTES, lambda call=call: call.cancel())
        own, places, idle = simulation.traces_of(world.all_rings, name, routers, begin_s, routers[turns.at])
        if status == "OK":
            world.last_tries.append(last := max(own, key=lambda each: each.heard_s))
            if replays != turns.moves + sum(each.session is last.session for each in own) - 1:
                world.loop.problems.append(f"{name} receives a wrong number of replays: {replays}")
        took = begin_s - world.begin_s, world.loop.now_s - begin_s, turns.timeout_s
        how = *took, replays, places, idle, frozenset[Any](), message, case.mode
        world.outcomes.append(simulation.RequestOutcome(each.case, status, turns.output, *how))


# The world


class ScriptedWorld(FaultyWorld):
    """The processes of one schedule, by name."""

    def __init__(self, loop: VirtualLoop, schedule: Schedule) -> None:
        super().__init__(loop)
        self.schedule, self.begin_s = schedule, loop.now_s + READY_S
        self.hosts, self.rings = dict[str, ScriptedHost](), dict[str, ScriptedRing]()
        self.all_rings, self.outcomes = list[WatchedRing](), list[simulation.RequestOutcome]()
        self.last_tries = list[Try]()  # each the last of a request that has all its text
        self.network.places = {name: name for name in (*HOSTS, *ROUTER_NAMES)}

    def start(self, name: str) -> None:
        process = self.new_process(name)
        process.context.run(self._start_router if name in ROUTER_NAMES else self._start_host, name)
        server: Any = self.rings[name] if name in ROUTER_NAMES else self.hosts[name]
        self.network.servers[name] = process, server

    def _start_host(self, name: str) -> None:
        host = self.hosts[name] = ScriptedHost(self.network, ENTRIES[HOSTS.index(name)])
        host.problems = self.loop.problems

    def _start_router(self, name: str) -> None:
        ring = self.rings[name] = ScriptedRing(name, self.hit, self.loop.problems)
        self.all_rings.append(ring)
        ring.hedging = Hedging(self.schedule.second_tries)
        for kind in ("ar", "chain"):
            ring.hedging.record(kind, simulation.USUAL_S)
        ring.scripted = [ScriptedLink(self, ring, entry) for entry in ENTRIES]
        ring.links = [*ring.scripted]

    def change(self, fault: PlannedFault, begins: bool) -> None:
        if fault.targets[0] in self.hosts:
            self.hosts[fault.targets[0]].change(fault, begins)
            if fault.kind == "echo":
                (self.network.states.add if begins else self.network.states.discard)(("echo", fault.targets[0]))

    def _check_links_soon(self) -> None:
        for name, after_s in product(ROUTER_NAMES, CHECK_S):
            self.processes[name].call_at(self.loop.now_s + after_s, self._check_links, self.rings[name])

    def _check_links(self, ring: ScriptedRing) -> None:
        if sum(link.look() for link in ring.scripted):  # of every one
            self.processes[ring.place].call_at(self.loop.now_s + CHECK_S[0], self._check_links, ring)
        ring._looked_at = monotonic()
        ring.look()

    def silent_since(self, one: str, other: str) -> float | None:
        """The moment from which on a host, or the link to it, says nothing; None where it does."""
        silent = (fault for fault in self.lasting if fault.kind in schedules.SILENT_KINDS)
        since_s = [fault.at_s for fault in silent if {*fault.targets} in ({other}, {one, other})]
        return self.begin_s + min(since_s) if since_s else None

    def run(self) -> simulation.ScheduleRun:
        """Run the schedule from its start to its end. Deterministic."""
        loop = self.loop
        for name in (*HOSTS, *ROUTER_NAMES):
            self.start(name)
        for fault in self.schedule.faults:
            loop.call_at(self.begin_s + fault.at_s, self.begin, fault)
            for at_s in (fault.at_s, fault.end_s) if fault.kind in ("kill", "replace", *schedules.SILENT_KINDS) else ():
                loop.call_at(self.begin_s + at_s, self._check_links_soon)
        for name, routers, asked in zip(
            schedules.CLIENT_NAMES, self.schedule.routers, self.schedule.requests, strict=False
        ):
            context = self.new_process(name).context
            loop.call_at(self.begin_s, context.run, StepTaker, name, partial(ask, self, name, routers, asked))
        requests = sum(map(len, self.schedule.requests))
        while len(self.outcomes) < requests:
            loop._run_once()
        self.end_all()
        heard_s = [self.begin_s + fault.end_s for fault in self.schedule.faults if fault.kind == "half-open"]
        end_s = max(loop.now_s, *heard_s, 0.0) + simulation.SETTLE_S
        while loop.now_s < end_s and any(host.sessions.sessions for host in self.hosts.values()):
            loop._run_once()
        problems = [*loop.problems, *simulation.leftovers(self)]
        sizes = {name: host.sessions.bytes for name, host in self.hosts.items() if not host.sessions.sessions}
        problems += [f"{name} holds {size} bytes for no session" for name, size in sizes.items() if size]
        return simulation.ScheduleRun(self.outcomes, [], None, problems, self.network.events)


class Script:
    """The scripted model, with the outcome of every case without faults."""

    def __init__(self) -> None:
        requests = (tuple(Asked(case, 0.0) for case in range(len(CASES))),)
        self.answers = [(each,) for each in self.run(Schedule(-1, requests, (ROUTER_NAMES[:1],), ())).outcomes]

    def schedule(self, seed: int) -> Schedule:
        return schedules.make_schedule(seed, len(CASES), is_scripted=True)

    def run(self, schedule: Schedule) -> simulation.ScheduleRun:
        with ExitStack() as stack:
            gc.disable()
            stack.callback(gc.enable)
            stack.enter_context(clock.replaced((loop := VirtualLoop()).time))
            stack.callback(loop.close)
            world = ScriptedWorld(loop, schedule)
            try:
                return world.run()
            except RuntimeError as error:
                return simulation.ScheduleRun([], [], None, [f"the run did not end: {error!r}"], world.network.events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    options = parser.parse_args()
    if options.schedules < 1 or options.seed < 0:
        parser.error("--schedules must be at least 1, and --seed at least 0")
    report = search(options.schedules, options.seed, Script(), "python .ci/schedules.py")
    print(report.table)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
