"""Hosts of the scripted model, for schedules.py: they admit, keep and forward as the real ones do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import loadtest.simulation.schedule as drawn
from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import CALLER, Process, here
from loadtest.simulation.network import SMALL_BYTES, Connection
from loadtest.simulation.processes import SimulatedHost, WatchedRing
from loadtest.simulation.schedule import HOSTS, STAGES
from serving.router.topology import HostEntry
from stages.host.metrics import LinkTable
from stages.host.parts import Release
from stages.host.scheduler import HopWork, TextWork
from stages.host.settings import HostSettings
from stages.model.draft_tree import Draft
from stages.model.vocabulary import BYTES
from stages.v1 import stage_pb2
from stages.wire.messages import copy_of, next_read, work_of
from stages.wire.status import StatusError, deadline_exceeded, unavailable

RTT_MS = 60.0
WEIGHTS, NO_DRAFT = ("chain", "ar", "", ""), Draft(())
ENTRIES = tuple(HostEntry(name, name, (i // drawn.REPLICAS,), name) for i, name in enumerate(HOSTS))
# A session takes a few bytes on a host: it has no cache but the text.
PICTURES = SimpleNamespace(draws=True, picture_architecture=SimpleNamespace(tokens=1, features=1, patch_dim=1))


def after(entry: HostEntry) -> list[HostEntry]:
    """Hosts of the next stage."""
    return [each for each in ENTRIES if each.blocks[0] == (entry.blocks[0] + 1) % len(STAGES)]


class ScriptedWork(TextWork):
    """A sweep or step. A session's cache is the text that it has read; of sweeps, with the ends of their pieces."""

    rows = 1
    next_op: Any = None  # there are no calls to the backend

    def complete(self, result: object) -> None:
        caches: dict[int, Any] = self.session.caches
        message: Any = work_of(self.hop)
        cache, clean, before = caches.get(0, b""), message.clean, "hidden"
        if is_sweep := isinstance(message, stage_pb2.Sweep):
            ends = [sum(message.reads[: i + 1]) for i in range(len(message.reads))]
            pieces = [clean[at:end] for at, end in zip([0, *ends], [*ends, None], strict=True)]
            cache, before = b"|".join([cache, *pieces]), "estimate"
        else:
            cache = cache[: self.start] + clean
        caches[0] = cache
        seen = b"%x" % crc32(cache, crc32(getattr(message, before)))
        if self.hop.place + 1 < len(self.hop.path):
            setattr(message, before, seen)
            self.outcome = self.hop
            return
        letters = bytes(97 + crc32(seen, at) % 26 for at in range(message.slots if is_sweep else 1))
        text = letters if is_sweep else clean[len(clean) - message.sample.draft :] + letters
        self.outcome = event = stage_pb2.Event(session=self.hop.session, number=self.number, text=text)
        if self.hop.read.sample.remaining > 1:
            self.result, self.outcome = event, next_read(self.hop, text, BYTES, 0, NO_DRAFT)


def parse(hop: stage_pb2.Hop, *_: object, **__: object) -> HopWork:
    """The work of a hop that a session made."""
    if not hop.left_s > 0:
        raise deadline_exceeded("the deadline of this request has passed")
    message: Any = work_of(hop)
    kind = "ar" if hop.HasField("read") else "chain"
    what: Any = {"hop": hop, "kind": kind, "number": message.number, "start": message.start, "clean": None}
    return ScriptedWork(**what, positions=len(message.clean), remembered=len(message.clean))


class ScriptedHost(SimulatedHost):
    """A host whose passes compute nothing."""

    full = False

    def __init__(self, network: Any, entry: HostEntry) -> None:  # noqa: ANN401
        models = dict.fromkeys(("chain", "ar"), SimpleNamespace(manifest=PICTURES))
        plan: Any = SimpleNamespace(blocks=entry.blocks, weights=WEIGHTS, models=models)
        parts: Any = SimpleNamespace(plan=plan, drafter=lambda kind: None)
        relays = {each.address: ScriptedRelay(network, each.address) for each in after(entry)}
        onward: Any = SimpleNamespace(to=relays.__getitem__, counters=LinkTable())
        super().__init__(Release("", plan, parts), HostSettings(entry.name, prefix_mb=0), onward)
        self.admission.parse, self.jobs, self.done = parse, deque[Any](), set[tuple[str, int, int]]()
        self.scheduler: Any = self
        self.submit = self.jobs.append

    def __len__(self) -> int:
        return len(self.jobs)

    def turn(self) -> list[Any]:
        ended = [self.jobs.popleft() for _ in range(len(self.jobs))]
        for job in ended:
            work, known = job.work, job.session.caches
            part, start = (work.hop.session, work.number, work.start), work.start
            message: Any = work_of(work.hop)
            clean = message.clean  # that begins with one known token at most
            is_again = work.kind == "ar" and known.get(0, b"")[start : start + 2] == clean[:2] != clean[:1]
            if job.session.pending < 1 or part in self.done or (start and 0 not in known) or is_again:
                self.problems.append(f"{self.settings.name} computes unwanted work, or work without its input")
            self.done.add(part)
            work.begin(job.session, 0)
            work.complete(None)
            job.result = work.outcome
        return ended

    def listen(self, ring: WatchedRing, opened: Callable[[], object], call: Any) -> None:  # noqa: ANN401
        """A router subscribes: it has every event at once."""
        publish = partial(call.connection.answer, SMALL_BYTES, ring._deliver)
        stream: Any = SimpleNamespace(bytes=0, key=b"", full=lambda: False, put_nowait=publish)
        self.subscribers.queues[ring.name] = stream

        def lost() -> None:
            if self.subscribers.queues.get(ring.name) is stream:
                del self.subscribers.queues[ring.name]
                self.sessions.release_router(ring.name)

        call.cancel, call.connection.served[call] = lost, None
        call.connection.answer(SMALL_BYTES, opened)


class ScriptedCall:
    """A call of one message over a `MemoryChannel`, and what is answered to it."""

    waits = False
    connection: Any = None
    cancel: Callable[[], object] = staticmethod(lambda: None)  # at the server, once the client has gone

    def __init__(self, channel: Any, serve: Callable[[Any], object], lost: Callable[[str], object]) -> None:  # noqa: ANN401
        """:param serve: is called at the server, with this call. :param lost: here, with the reason."""
        self.serve, self.lost = serve, lost
        channel.begin(self)

    def begin(self, connection: Any) -> None:  # noqa: ANN401
        self.connection, connection.calls[self] = connection, None
        connection.send(SMALL_BYTES, self.serve, self)

    def lose(self, why: str) -> None:
        self.end()
        self.lost(why)

    def end(self) -> None:
        if self.connection is not None:
            self.connection.calls.pop(self, None)


def call_later(process: Process, after_s: float, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401
    """Call by the clock of a process."""
    process.call_at(process.loop.now_s + after_s / process.rate, call, *arguments).is_by_clock = True


class StepTaker:
    """Takes steps in virtual time."""

    def __init__(self, caller: str, steps: Callable[[StepTaker], Generator[Any, None, None]]) -> None:
        """:param caller: the client that they are for."""
        self.caller, self.process, self.inbox, self.waits, self.hears = caller, here(), deque[Any](), 0, False
        self.steps = steps(self)
        self.go(0)

    def go(self, wait: int) -> None:
        """Take those after a wait, unless it is over."""
        if wait == self.waits:
            self.hears, self.waits = False, wait + 1
            CALLER.set(self.caller)
            if (due := next(self.steps, None)) is not None:
                self.hears = due.until_event
                call_later(self.process, due.seconds, self.go, self.waits)

    def hear(self, *event: Any) -> None:  # noqa: ANN401
        self.inbox.extend(event)
        if self.hears:
            self.go(self.waits)

    def cancel(self) -> None:
        self.hears, self.waits = False, self.waits + 1
        self.steps.close()


class ScriptedRelay:
    """A way to a host, as `Relay` is one: it tells of hops that are refused or lost."""

    min_rtt_ms, late_ms, asked_at = RTT_MS, 0.0, None
    wake = staticmethod(bool)  # nothing cools down

    def __init__(self, network: Any, address: str, hop_timeout_s: float = 5.0) -> None:  # noqa: ANN401
        self.address, self.hop_timeout_s, self.channel = address, hop_timeout_s, MemoryChannel(network, address)
        if address in network.servers:
            self.channel.connection = Connection(self.channel, *network.servers[address][::-1])
        else:  # it starts in this moment
            ScriptedCall(self.channel, ScriptedCall.end, lambda why: None)

    def send(self, hop: stage_pb2.Hop, settled: Callable[[StatusError | None], object]) -> None:
        call = ScriptedHop(self.channel, hop, settled)
        due_s, silent = min(self.hop_timeout_s, hop.left_s), f"{self.address} did not answer"
        silence = silent if due_s < hop.left_s else deadline_exceeded(silent)
        call_later(here(), max(due_s, 0.001), call.lose, silence)


class ScriptedHop(ScriptedCall):
    """A hop on its way to a host."""

    def __init__(self, channel: Any, hop: stage_pb2.Hop, settled: Any) -> None:  # noqa: ANN401
        self.hop, self.settled = hop, settled
        channel.begin(self)

    def serve(self, _: ScriptedCall) -> None:
        connection, host = self.connection, self.connection.serves
        try:
            host.accept(copy_of(self.hop), SMALL_BYTES)
            if ("echo", connection.client.place) in connection.network.states:
                with suppress(StatusError):
                    host.accept(copy_of(self.hop), SMALL_BYTES)
            host._go()
        except StatusError as error:
            connection.answer(SMALL_BYTES, self.lose, error)
        else:
            if connection.back.cut:
                connection.answer(SMALL_BYTES, self.lose, None)
            else:
                self.lose(None)  # a receipt takes no time

    def lose(self, why: StatusError | str | None) -> None:
        """Tell the sender, once. None: the host has it."""
        settled, self.settled = self.settled, None
        if settled is not None:
            self.end()
            settled(unavailable(why) if isinstance(why, str) else why)
