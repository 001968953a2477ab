"""The link to the next host: sends hops, and keeps the connection warm.

Hops go over one stream, and hops that leave together share a batch: one call per hop would cost half a millisecond of
processor time. A small message every 150 ms keeps TCP's congestion window from shrinking to its initial size between
the hops of a request; gRPC's keepalive pings do not. An idle link is only asked for a sign of life.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import grpc
import grpc.aio

from stages.clock import monotonic
from stages.errors import InputError, printable
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import DEFAULT_MESSAGE_BYTES, KEEP_WARM_S, open_channel
from stages.wire.messages import PROTOCOL, hops_refusal, seconds_until
from stages.wire.status import (
    STATUS_MARK,
    StatusError,
    deadline_exceeded,
    made_printable,
    retry_after_ms,
    trailing_metadata,
    unavailable,
)
from stages.wire.tls import LOOPBACK_ONLY, Security, handshake_problem
from stages.wire.tokens import own_token, token_metadata

WARM_TIMEOUT_S = 2.0
# A link without hops for this long is idle, and gets one message in each such period: twenty small messages a second to
# each neighbour cost a host two hundredths of a core for nothing.
IDLE_AFTER_S, IDLE_PAUSE_S = 10.0, 2.0
# Sizes sent over a new link, until one takes this much longer than nothing, or exceeds this part of the largest hop.
OPENING_BYTES, OPENING_MS, OPENING_PART = tuple(1 << power for power in range(15, 21)), 250.0, 8
# The quickest of this many keep-warm messages gives the link's round trip: others may have waited for a processor.
RECENT = 8
# The greatest delay of an answer fades by this with each later answer: half is left after about ten seconds.
LATE_DECAY = 0.99
# One call per hop took 0.5 ms there and back and 0.6 ms of processor time; a message on an open stream, half of that.
BATCH_BYTES = 1 << 20  # a batch takes hops until it has this many bytes
# and about this many, evenly divided: the next host begins with the first while this one still works on the others, and
# a hop left over would travel alone for the rest of its text.
BATCH_HOPS = 8
# An ack costs both sides nearly as much as a batch. While batches follow each other, one ack covers all batches within
# a hundredth of the time that an ack may take, or within this many bytes.
TICKS, ACK_BYTES = 100, 1 << 16

Settled = Callable[[StatusError | None], None]  # called once with a hop's result: None when the next host has queued it


class LinkObserver:
    """Observer of one link; this one ignores what it sees."""

    def sent(self, size_bytes: int) -> None:
        """A hop left."""

    def handed_over(self, seconds: float) -> None:
        """A hop's ack came, this long after the hop was given to the link."""


class _Handover:
    def __init__(self, hop: stage_pb2.Hop, settled: Settled) -> None:
        self.hop, self._settled = hop, settled
        self.begin, self.due_at = monotonic(), monotonic() + hop.left_s
        self.is_settled = False

    def settle(self, refusal: StatusError | None) -> None:
        if not self.is_settled:
            self.is_settled = True
            self._settled(refusal)


class Relay:
    """A warm connection to one stage server."""

    def __init__(
        self,
        address: str,
        message_bytes: int,
        hop_timeout_s: float,
        name: str = "",
        security: Security = LOOPBACK_ONLY,
        answer_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        """:param message_bytes: largest message to send.
        :param hop_timeout_s: how long a hop may wait for the next host's acknowledgement.
        :param answer_bytes: largest message to accept.
        :param name: the host's name in errors; by default its own, once it has described itself.

        Raises InputError if `security` does not allow dialling it.
        """
        self.address, self.hop_timeout_s = address, hop_timeout_s
        self.name = name
        self.observer = LinkObserver()
        self.problem = ""
        """Why no hop can use this link; empty if hops can. Kept by the owner of the link."""
        self.security, self._message_bytes = security, message_bytes
        self._options = (("grpc.max_receive_message_length", answer_bytes),)
        self._former: list[grpc.aio.Channel] = []
        self._open()
        self.rtt_ms: float | None = None
        """Round trip of the last keep-warm message; None while the host does not answer."""
        self.asked_at: float | None = None
        """When the oldest keep-warm message without an answer was sent, by the monotonic clock."""
        self._used_at = monotonic()
        self._is_cold, self._is_due = False, asyncio.Event()  # of the next keep-warm message
        self._rtts_ms: deque[float] = deque(maxlen=RECENT)
        self.late_ms = 0.0
        """The recent delay of answers to keep-warm messages; a busy machine answers late."""
        self._outbox: deque[_Handover] = deque()
        self._sent: dict[int, list[_Handover]] = {}
        """Hops handed to gRPC that have no ack yet, by the number of their batch."""
        self._batches = 0
        self._ack_at = 0.0  # the first batch from then on asks for an ack, by the monotonic clock
        self._quiet_bytes = 0  # sent since a batch last asked
        self._asks = False  # no batch followed in time, so an empty one asks
        self._ticker: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._streamer: asyncio.Task[None] | None = None

    def send(self, hop: stage_pb2.Hop, settled: Settled) -> None:
        """Send a hop. Calls `settled` once, with a StatusError that names this address if the hop failed."""
        self.wake()
        self._outbox.append(_Handover(hop, settled))
        self._wake.set()
        if self._ticker is None:
            self._tick()
        if self._streamer is None or self._streamer.done():
            self._streamer = asyncio.create_task(self._stream())

    async def describe(
        self, timeout: float, prefixes: int | None = None, sessions: Iterable[str] = (), faulty: Iterable[str] = ()
    ) -> stage_pb2.DescribeResponse:
        """Description of the next host. Raises StatusError.

        :param prefixes: the version of its prefix list known here; None: do not ask for the list.
        :param sessions: sessions under way there, whose leases to renew.
        :param faulty: instances of hosts found faulty by audits.
        """
        begin = monotonic()
        try:
            request = stage_pb2.DescribeRequest(prefixes=prefixes, sessions=sessions, faulty=faulty)
            description = made_printable(await self.stub.Describe(request, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise self.refusal(error, begin) from None
        self.name = self.name or description.name
        if description.protocol != PROTOCOL:
            raise hops_refusal(description.protocol, self.host, "this side")
        return description

    async def warm(self, size: int) -> None:
        """Send one message of `size` bytes, so that the next of that size finds the congestion window open."""
        begin = monotonic()
        if self.asked_at is None:
            self.asked_at = monotonic()
        try:
            await self.stub.Warm(stage_pb2.WarmRequest(padding=bytes(size)), timeout=WARM_TIMEOUT_S)
            self.rtt_ms = (monotonic() - begin) * 1000
            self._rtts_ms.append(self.rtt_ms)
            waited_s = monotonic() - self.asked_at if self.asked_at is not None else 0.0
            self.late_ms, self.asked_at = max(waited_s * 1000, LATE_DECAY * self.late_ms), None
        except grpc.aio.AioRpcError as error:
            self.rtt_ms = None
            self._rtts_ms.clear()
            raise self.refusal(error, begin) from None

    async def open_up(self) -> None:
        """Send ever larger messages, until one takes long. A sender that paces (BBR) never exceeds a rate that it has
        once needed: hops of 16 kB stayed 14 ms too slow on a fast link. Raises StatusError if one does not arrive.
        """
        await self.warm(0)
        quick_ms = (self.rtt_ms or 0.0) + OPENING_MS
        for size in OPENING_BYTES:
            if size <= self._message_bytes // OPENING_PART and (self.rtt_ms or 0.0) <= quick_ms:
                await self.warm(size)

    @property
    def is_idle(self) -> bool:
        """True if no request has used the link recently."""
        return monotonic() - self._used_at > IDLE_AFTER_S

    def wake(self) -> None:
        """Open the congestion window of an idle link: work is about to use it."""
        before, self._used_at = self._used_at, monotonic()
        if self._used_at - before > IDLE_AFTER_S:
            self._is_cold = True
            self._is_due.set()

    async def keep_warm(self, size: int, pause_s: float = KEEP_WARM_S) -> None:
        """Warm the link forever, every `pause_s` while in use; after a break, with `size` bytes."""
        while True:
            is_cold, self._is_cold = self.rtt_ms is None or self._is_cold, False
            self._is_due.clear()
            try:
                await self.warm(size if is_cold else 0)
            except StatusError:
                await asyncio.sleep(pause_s)
            pause_now_s = max(pause_s, IDLE_PAUSE_S) if self.is_idle else pause_s
            timer = asyncio.get_running_loop().call_later(pause_now_s, self._is_due.set)
            await self._is_due.wait()
            timer.cancel()

    async def close(self, grace_s: float | None = None) -> None:
        """:param grace_s: how long calls may still wait for an answer; None = not at all."""
        if self._streamer is not None:
            self._streamer.cancel()
            await asyncio.gather(self._streamer, return_exceptions=True)
        self._settle_all(self._closed())
        for channel in (*self._former, self.channel):
            await channel.close(grace_s)

    def _open(self) -> None:
        stamp = self.security.stamp()
        shown = token_metadata(own_token(self.address))  # never $ONESWEEP_TOKEN: the host may be another person's
        self.channel = open_channel(self.address, self._message_bytes, self.security, self._options, shown)
        self._stamp = stamp
        self.stub: stage_pb2_grpc.StageServiceAsyncStub = stage_pb2_grpc.StageServiceStub(self.channel)

    def _renew(self) -> None:
        """After a failed connection, make the next one show the new certificate if it was renewed meanwhile."""
        if self.security.stamp() == self._stamp:
            return
        former = self.channel
        try:
            self._open()
        except InputError:  # perhaps only half of it is replaced so far
            return
        # let its last calls end by themselves; one without a connection has none by the next renewal
        live = (each for each in self._former if each.get_state() is grpc.ChannelConnectivity.READY)
        self._former = [*live, former]
        if self._streamer is not None:
            self._streamer.cancel()  # it would wait for the old connection to come back

    @property
    def min_rtt_ms(self) -> float | None:
        """Least round trip of the last few keep-warm messages; None while the host does not answer."""
        return min(self._rtts_ms, default=None)

    @property
    def host(self) -> str:
        """Name of the other side in errors."""
        return f"host {self.name} at {self.address}" if self.name else f"the host at {self.address}"

    async def _stream(self) -> None:
        """One stream, from its first batch to its end; hops without an ack by then have failed."""
        begin = monotonic()
        refusal = unavailable(f"{self.host} closed the connection; check that it runs")
        wake = self._wake = asyncio.Event()
        wake.set()  # for hops already in the outbox
        self._ack_at, self._quiet_bytes = 0.0, 0
        try:
            # the ack comes before the work, so nothing nests: a sweep takes H + 1 one-way trips, not 2 H
            async for ack in self.stub.Push(self._batch_stream(wake), wait_for_ready=True):
                if (handovers := self._sent.get(ack.number)) is None:
                    continue
                for rejection in ack.rejections:
                    if rejection.index < len(handovers):
                        status_message = f"{self.host} refused: {rejection.message}"
                        refused = StatusError.numbered(rejection.code, status_message, rejection.retry_after_ms or None)
                        handovers[rejection.index].settle(refused)
                for handover in handovers:
                    self.observer.handed_over(monotonic() - handover.begin)
                for number in [number for number in self._sent if number <= ack.number]:
                    for handover in self._sent.pop(number):
                        handover.settle(None)
        except grpc.aio.AioRpcError as error:
            refusal = self.refusal(error, begin)
        except grpc.aio.UsageError:
            refusal = self._closed()
        finally:
            self._wake = asyncio.Event()
            wake.set()  # gRPC does not end the iterator of an ended call, so make it end by itself
            self._settle_all(refusal)

    @property
    def _unsettled(self) -> list[_Handover]:
        known = [handover for handovers in self._sent.values() for handover in handovers] + [*self._outbox]
        return [handover for handover in known if not handover.is_settled]

    def _settle_all(self, refusal: StatusError) -> None:
        unsettled = self._unsettled
        self._sent.clear()
        self._outbox.clear()
        for handover in unsettled:
            handover.settle(refusal)

    async def _batch_stream(self, wake: asyncio.Event) -> AsyncIterator[stage_pb2.HopBatch]:
        """Batches of the stream that `wake` belongs to."""
        while True:
            await wake.wait()
            wake.clear()
            while self._wake is wake and (self._outbox or self._asks):
                if (taken := self._take()) or self._asks:
                    self._batches += 1
                    self._sent[self._batches] = taken
                    hops = [handover.hop for handover in taken]
                    quiet = self._is_quiet()
                    yield stage_pb2.HopBatch(number=self._batches, hops=hops, protocol=PROTOCOL, quiet=quiet)
            if self._wake is not wake:
                return

    def _is_quiet(self) -> bool:
        """True if the last batch does not need its own ack."""
        if self._asks or monotonic() >= self._ack_at or self._quiet_bytes > ACK_BYTES:
            self._ack_at, self._quiet_bytes, self._asks = monotonic() + self.hop_timeout_s / TICKS, 0, False
            return False
        return True

    def _tick(self) -> None:
        """Give up late hops, and ask for an ack if no batch did. All hops share one timer."""
        now, pause_s = monotonic(), self.hop_timeout_s / TICKS
        for handover in self._unsettled:
            if now >= handover.due_at:
                handover.settle(deadline_exceeded(f"the deadline passed before {self.host} answered"))
            elif now >= handover.begin + self.hop_timeout_s:
                handover.settle(self._silent(handover.begin))
        if self._quiet_bytes and now >= self._ack_at + pause_s:
            self._asks = True
            self._wake.set()
        self._ticker = asyncio.get_running_loop().call_later(pause_s, self._tick) if self._unsettled else None

    def _take(self) -> list[_Handover]:
        """Take as many waiting hops as fit into one batch."""
        taken: list[_Handover] = []
        size, batches = 0, max(1, round(len(self._outbox) / BATCH_HOPS))
        most = -(-len(self._outbox) // batches)
        while self._outbox and size < BATCH_BYTES and len(taken) < most:
            handover = self._outbox.popleft()
            if not handover.is_settled:
                handover.hop.left_s = seconds_until(handover.due_at)  # it waited here
                taken.append(handover)
                size += handover.hop.ByteSize()
        self._quiet_bytes += size
        self.observer.sent(size)
        return taken

    def _closed(self) -> StatusError:
        return unavailable(f"the link to {self.host} was closed")

    def _silent(self, begin: float) -> StatusError:
        self._renew()
        waited_s = monotonic() - begin
        return unavailable(f"{self.host} did not answer within {waited_s:.1f} s; check that it runs and is reachable")

    def loss(self, error: grpc.aio.AioRpcError) -> str:
        """The reason why a call that should last forever ended."""
        refusal = self.refusal(error, monotonic())
        explained = STATUS_MARK in trailing_metadata(error) or handshake_problem(error.details() or "", self.security)
        return refusal.message if explained else printable(error.details() or error.code().name, newline=" ")

    def refusal(self, error: grpc.aio.AioRpcError, begin: float) -> StatusError:
        """The error for a failed call. `begin`: its start, by the performance counter."""
        code, details, metadata = error.code(), error.details() or "", trailing_metadata(error)
        if STATUS_MARK in metadata:
            return StatusError(code, f"{self.host} refused: {details}", retry_after_ms(metadata))
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # gRPC cancels calls of a busy host
            self._renew()
            problem = handshake_problem(details, self.security)
            return unavailable(f"{self.host} {problem or f'cannot be reached ({details}); check that it runs'}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._silent(begin)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return StatusError(code, f"{self.address} is not a stage server; the first host follows the last")
        return StatusError(code, f"{self.host} failed: {details}")
