"""The gRPC face of a host."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import json_format

from stages.checkpoint.files import replace_file
from stages.checkpoint.release_store import COMPANIONS, ReleaseStore, Wants
from stages.checkpoint.release_transfer import drain_requests, receive_release, transfer_error
from stages.clock import monotonic
from stages.errors import InputError, OnesweepError
from stages.host.host import Host
from stages.host.loading import Loader, Sources
from stages.host.plan import full_state_bytes
from stages.host.prefixes import KEY_BYTES, MAX_FAULTY
from stages.threads import in_thread
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.auth import ROUTER, check_sender, identity_of
from stages.wire.channel import check_target
from stages.wire.hop_stream import Relay
from stages.wire.link_quality import MAX_PROBE_BYTES, PROBE_TIMEOUT_S, kernel_now, measure_link
from stages.wire.messages import PROTOCOL, check_label
from stages.wire.status import Context, StatusError, aborted, exhausted, failed_precondition, invalid, unavailable
from stages.wire.tls import Expiry, Security, Tls

MAX_RELEASED = 4096
MAX_HOPS = 8192  # of a batch: each of 6 MB of empty hops would be refused by itself, which takes 24 s
MAX_STALL_MS = 60_000
ASSIGNMENT_NAME = "assignment.json"  # next to the releases of a host that was started without a checkpoint
MAX_NEXT, MAX_BLOCKS = 64, 1024
VERSION = version("onesweep")  # read once: finding it takes longer than the rest of an answer to Describe


def read_assignment(store: ReleaseStore) -> stage_pb2.Assignment | None:
    """The stage that a host was given before; None if there was none."""
    try:
        text = (store.directory / ASSIGNMENT_NAME).read_text(encoding="utf-8")
        return json_format.Parse(text, stage_pb2.Assignment())
    except (OSError, ValueError, json_format.ParseError):
        return None


class StageSeat:
    """A host's place in a ring, if it has no checkpoint: a router assigns it and may change it."""

    def __init__(
        self, store: ReleaseStore, security: Security, room: Callable[[], stage_pb2.Room], changed: asyncio.Event
    ) -> None:
        """:param changed: set when another stage is to be served."""
        self.store, self.security, self.room, self._changed = store, security, room, changed
        # Links a serving host to other next hosts.
        self.relink: Callable[[Sequence[str]], None] | None = None

    def wants(self, offer: stage_pb2.Offer) -> Wants:
        """The files of the offered stage. Every host gets the tokenizer, which is small; a host with the end of a model
        also gets local/, to draft."""
        blocks, parts = frozenset(offer.assignment.blocks), 0
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an invalid manifest is refused later
            manifests = (each.content for each in offer.manifests if each.folder == "ar")
            parts = len(json.loads(next(manifests, b"{}"))["parts"])
        is_last = parts - 1 in blocks
        return lambda folder, part: (
            is_last if folder == "local" else part in blocks or (folder == "ar" and part == COMPANIONS)
        )

    async def take(self, request: stage_pb2.LoadRequest, context: Context) -> None:
        """Make this host serve another stage once the call is answered. Raises StatusError."""
        given = request.assignment
        if len(given.next) > MAX_NEXT or len(given.blocks) > MAX_BLOCKS:
            raise invalid(f"a stage has at most {MAX_BLOCKS} blocks and {MAX_NEXT} next hosts")
        try:
            for address in given.next:
                check_target(address, self.security, "next address")
            if not request.release:
                await self._change_links(given)
                return
            await in_thread(Sources(self.store.directory, tuple(given.blocks), self.store).plan, request.release)
            await in_thread(self._record, request)
        except OnesweepError as error:
            raise transfer_error(error) from None
        # the server ends on the change, so let the answer leave first
        ended: Any = lambda _: self._changed.set()  # noqa: E731 - the stubs want a type that they do not export
        context.add_done_callback(ended)

    async def _change_links(self, given: stage_pb2.Assignment) -> None:
        """Change the next hosts. Sessions under way stay, except those whose next host is no longer linked."""
        held = read_assignment(self.store)
        if self.relink is None or held is None or held.blocks != given.blocks:
            raise failed_precondition("this host does not serve these blocks: give it the release too")
        await in_thread(self._write, given)
        self.relink(given.next)

    def _record(self, request: stage_pb2.LoadRequest) -> None:
        """Record the stage for this host's next start. The previous release's files stay, for a rollback.

        Raises CheckpointError if the record cannot be written."""
        self._write(request.assignment)
        before = self.store.in_use[-1:]
        self.store.use([request.release])
        self.store.remove_others([*before, request.release])

    def _write(self, given: stage_pb2.Assignment) -> None:
        record = json_format.MessageToJson(given)
        replace_file(self.store.directory / ASSIGNMENT_NAME, lambda path: path.write_text(record, encoding="utf-8"))

    async def round_trips(self, addresses: Sequence[str]) -> list[stage_pb2.LinkQuality]:
        """Measure small messages to each machine, over the same route as a hop. Raises StatusError."""
        if len(addresses) > MAX_NEXT:
            raise invalid(f"a call can measure at most {MAX_NEXT} machines")
        relays = list[Relay]()
        try:
            for address in addresses:
                relays.append(Relay(address, MAX_PROBE_BYTES, PROBE_TIMEOUT_S, security=self.security))
            return list(await asyncio.gather(*(_quality(relay, 0, 1) for relay in relays)))
        except InputError as error:
            raise invalid(str(error)) from None
        finally:
            await asyncio.gather(*(relay.close() for relay in relays))


async def _quality(relay: Relay, state_bytes: int, rate_bytes: int) -> stage_pb2.LinkQuality:
    """Measure a link, which may not work."""
    try:
        return await measure_link(relay, state_bytes, rate_bytes)
    except grpc.aio.AioRpcError as error:
        problem = f"{relay.host} does not answer ({error.details() or error.code().name})"
        return stage_pb2.LinkQuality(address=relay.address, problem=problem)


def _seat_of(seat: StageSeat | None) -> StageSeat:
    if seat is None:
        raise failed_precondition(
            "this host was started with a checkpoint: only a host started by `onesweep join` accepts a stage"
        )
    return seat


async def _stored(
    store: Callable[[], ReleaseStore],
    storing: asyncio.Lock,
    requests: AsyncIterator[stage_pb2.StoreRequest],
    wants: Callable[[stage_pb2.Offer], Wants],
) -> AsyncIterator[stage_pb2.StoreResponse]:
    try:
        there = store()
        if storing.locked():
            raise aborted("another release is being stored: try again when it is done")
        async with storing:
            async for response in receive_release(there, requests, wants):
                yield response
    except StatusError:
        yield stage_pb2.StoreResponse(refused=True)
        await drain_requests(requests)
        raise


class WaitingService(stage_pb2_grpc.StageServiceServicer):
    """The gRPC face of a host that has no stage yet; all other calls are UNAVAILABLE."""

    def __init__(self, name: str, seat: StageSeat, problem: str) -> None:
        """:param problem: why the last stage could not be served; empty if there was none."""
        self.name, self.seat, self.problem = name, seat, problem
        self._storing = asyncio.Lock()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        reason = self.problem or "it is waiting for a stage: give it one"
        return stage_pb2.DescribeResponse(
            name=self.name, version=VERSION, not_ready_reason=reason, protocol=PROTOCOL, room=self.seat.room()
        )

    async def Warm(self, request: stage_pb2.WarmRequest, context: Context) -> stage_pb2.WarmResponse:
        return stage_pb2.WarmResponse()

    async def Probe(self, request: stage_pb2.ProbeRequest, context: Context) -> stage_pb2.ProbeResponse:
        links = await self.seat.round_trips(request.to)
        return stage_pb2.ProbeResponse(kernel=kernel_now(), links=links, unix_us=time.time_ns() // 1000)

    def Store(
        self, requests: AsyncIterator[stage_pb2.StoreRequest], context: Context
    ) -> AsyncIterator[stage_pb2.StoreResponse]:
        return _stored(lambda: self.seat.store, self._storing, requests, self.seat.wants)

    async def _refuse(self, request: object, context: Context) -> NoReturn:
        raise unavailable(f"{self.name} is waiting for a stage")

    Push = Subscribe = Release = Drop = _refuse  # type: ignore[assignment]

    async def Load(self, request: stage_pb2.LoadRequest, context: Context) -> stage_pb2.LoadResponse:
        await self.seat.take(request, context)
        return stage_pb2.LoadResponse()


class StageService(stage_pb2_grpc.StageServiceServicer):
    """Turns messages into calls of a Host; a StatusError ends a call (stages/wire/status.py)."""

    def __init__(self, host: Host, loader: Loader, seat: StageSeat | None = None, tls: Tls | None = None) -> None:
        self.host, self.loader, self.seat, self.expiry = host, loader, seat, Expiry(tls)
        self.not_ready_reason = "loading weights"
        self._probing, self._storing = asyncio.Lock(), asyncio.Lock()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        for name in self._own(request.sessions, context):
            if (session := self.host.sessions.sessions.get(name)) is not None:
                self.host.sessions.renew(session, monotonic())
        if len(request.faulty) > MAX_FAULTY:
            raise invalid(f"a call can name at most {MAX_FAULTY} faulty hosts")
        if (peer := identity_of(context)) is None or peer.role == ROUTER:
            self.host.prefixes.forget(request.faulty)
        description = self.description()
        if request.HasField("prefixes"):
            description.prefixes.CopyFrom(self.host.prefixes.listing(request.prefixes))
        return description

    def description(self) -> stage_pb2.DescribeResponse:
        reason = "it is stopping" if self.host.admission.stopping else self.not_ready_reason
        return stage_pb2.DescribeResponse(
            name=self.host.settings.name,
            instance=self.host.instance,
            version=VERSION,
            blocks=self.host.blocks,
            ready=not reason,
            not_ready_reason=reason,
            links=[
                stage_pb2.LinkInfo(address=relay.address, rtt_ms=relay.min_rtt_ms or 0.0, problem=relay.problem)
                for relay in self.host.next_hosts.relays
            ],
            counters=self.host.counters_now(),
            backend=self.loader.backend.kind,
            machine=self.loader.backend.machine,
            releases=[release.info() for release in self.host.releases.all],
            protocol=PROTOCOL,
            room=self.seat.room() if self.seat else None,
            unix_us=time.time_ns() // 1000,
            stall_ms=min(int(self.host.stall_s * 1000), MAX_STALL_MS),
            certificate_until_s=self.expiry.until_s(),
            one_at_a_time=any(each.parts is not None and each.parts.one_at_a_time for each in self.host.releases.all),
        )

    async def Push(self, batches: AsyncIterator[stage_pb2.HopBatch], context: Context) -> AsyncIterator[stage_pb2.Ack]:
        peer = identity_of(context)
        sender = None if peer is None else partial(check_sender, context, peer)
        async for batch in batches:
            if len(batch.hops) > MAX_HOPS:
                raise invalid(f"a batch has {len(batch.hops)} hops; the limit is {MAX_HOPS}")
            ack = self.host.take(batch, sender)
            if ack.rejections or not batch.quiet:
                yield ack

    async def Subscribe(self, request: stage_pb2.SubscribeRequest, context: Context) -> AsyncIterator[stage_pb2.Events]:
        check_label(request.router, "router")
        if len(request.key) not in (0, KEY_BYTES):
            raise invalid(f"a voucher key must have {KEY_BYTES} bytes, not {len(request.key)}")
        try:
            async with aclosing(self.host.subscribers.listen(request.router, request.key)) as events:
                async for event in events:
                    yield event
        finally:
            if request.router not in self.host.subscribers.queues:
                self.host.sessions.release_router(request.router)

    async def Release(self, request: stage_pb2.ReleaseRequest, context: Context) -> stage_pb2.ReleaseResponse:
        if len(request.sessions) > MAX_RELEASED:
            raise invalid(f"a call can release at most {MAX_RELEASED} sessions")
        own = self._own(request.sessions, context)
        response = stage_pb2.ReleaseResponse(released=await self.host.end(own))
        if request.HasField("prefixes"):
            response.prefixes.CopyFrom(self.host.prefixes.listing(request.prefixes))
        return response

    def _own(self, names: Iterable[str], context: Context) -> list[str]:
        """The names, without those of sessions of routers other than the caller."""
        peer, there = identity_of(context), self.host.sessions.sessions
        return [
            name
            for name in names
            if peer is None or name not in there or there[name].router.rpartition(".")[0] == peer.name
        ]

    async def Warm(self, request: stage_pb2.WarmRequest, context: Context) -> stage_pb2.WarmResponse:
        if request.reply_bytes > MAX_PROBE_BYTES:
            raise invalid(f"an answer can have at most {MAX_PROBE_BYTES} bytes")
        if request.padding:  # a request is coming: its state should find every congestion window open
            self.host.next_hosts.wake()
        return stage_pb2.WarmResponse(padding=bytes(request.reply_bytes))

    async def Probe(self, request: stage_pb2.ProbeRequest, context: Context) -> stage_pb2.ProbeResponse:
        response = stage_pb2.ProbeResponse(kernel=kernel_now(), unix_us=time.time_ns() // 1000)
        if request.to:
            response.links.extend(await _seat_of(self.seat).round_trips(request.to))
            return response
        if not 1 <= request.bytes <= MAX_PROBE_BYTES:
            raise invalid(f"a probe must send 1 to {MAX_PROBE_BYTES} bytes")
        if self._probing.locked():
            raise exhausted("another probe is running", retry_after_ms=2000)
        async with self._probing:
            state_bytes = full_state_bytes(self.host.releases.newest.plan)
            for relay in self.host.next_hosts.relays:
                response.links.append(await _quality(relay, state_bytes, request.bytes))
        return response

    def Store(
        self, requests: AsyncIterator[stage_pb2.StoreRequest], context: Context
    ) -> AsyncIterator[stage_pb2.StoreResponse]:
        def wants(offer: stage_pb2.Offer) -> Wants:
            return _seat_of(self.seat).wants(offer) if offer.HasField("assignment") else self._needs

        return _stored(self.loader.require_store, self._storing, requests, wants)

    def _needs(self, folder: str, part: int) -> bool:
        plan = self.host.releases.newest.plan
        if folder == "local":
            return plan.is_last and not plan.draws
        # the last host needs the tokenizer to hold texts to a schema
        return part in self.host.blocks or (folder == "ar" and part == COMPANIONS and plan.is_last)

    async def Load(self, request: stage_pb2.LoadRequest, context: Context) -> stage_pb2.LoadResponse:
        if request.HasField("assignment"):
            await _seat_of(self.seat).take(request, context)
        else:
            await self.loader.load(request.release, set(request.keep))
        return stage_pb2.LoadResponse()

    async def Drop(self, request: stage_pb2.DropRequest, context: Context) -> stage_pb2.DropResponse:
        # a cancelled transfer may be about to move the release into place
        async with self._storing:
            await self.loader.drop(request.release)
        return stage_pb2.DropResponse()
