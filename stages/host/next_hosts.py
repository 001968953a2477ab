"""A host's outgoing links: a warm connection to each host that may come next, and the routers that listen."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from stages.clock import monotonic
from stages.errors import InputError
from stages.host.metrics import LinkTable
from stages.threads import cancelled
from stages.v1 import stage_pb2
from stages.wire.hop_stream import WARM_TIMEOUT_S, Relay
from stages.wire.status import StatusError, failed_precondition
from stages.wire.tls import LOOPBACK_ONLY, Security

log = logging.getLogger(__name__)

RETRY_S = 0.2
CHECK_S = 0.5
REVIEW_S = 5.0  # pause between checks of a host whose keep-warm messages arrive, or that gets none
AGAIN_S = 5.0  # pause before a failed link is tried again: the certificate may have been in the middle of a replacement

Wiring = Callable[[str, stage_pb2.DescribeResponse], str]  # why the host at an address cannot follow; empty when it can


class NextHosts:
    """Relays by address. Lives on the event loop."""

    def __init__(
        self,
        wiring: Wiring,
        state_bytes: int,
        message_bytes: int,
        hop_timeout_s: float,
        keep_warm_s: float,
        security: Security = LOOPBACK_ONLY,
    ) -> None:
        """:param state_bytes: size of the largest usual hop; a message of this size opens a link's congestion window.
        :param message_bytes: largest message that a hop may need.
        :param keep_warm_s: pause between messages that keep an idle link's window open; 0 = none."""
        self._wiring, self._state_bytes, self._security, self.counters = wiring, state_bytes, security, LinkTable()
        self._message_bytes, self._hop_timeout_s, self._keep_warm_s = message_bytes, hop_timeout_s, keep_warm_s
        self._relays: dict[str, Relay] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._wanted: tuple[str, ...] = ()
        self._refused: dict[str, str] = {}
        """Why an address has no link."""
        self._again: asyncio.TimerHandle | None = None

    @property
    def relays(self) -> list[Relay]:
        return list(self._relays.values())

    @property
    def problem(self) -> str:
        """Why no host can follow; empty when one can, or none is needed."""
        problems = [relay.problem for relay in self._relays.values()]
        return "" if not all(problems) else next(iter(problems), "")

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Link to these hosts and no others."""
        for address in set(self._relays) - set(addresses):
            self._keepers.pop(address).cancel()
            closing = asyncio.create_task(self._relays.pop(address).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._wanted = tuple(addresses)
        self._link_up()

    def _link_up(self) -> None:
        """Make the missing links, retrying from time to time."""
        if self._again is not None:
            self._again.cancel()
        before, self._refused = self._refused, {}
        for address in self._wanted:
            if address not in self._relays:
                try:
                    self._open(address)
                except InputError as error:
                    self._refused[address] = str(error)
                    if before.get(address) != str(error):
                        log.warning("no link to %s: %s", address, error)
        self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._link_up) if self._refused else None

    def _open(self, address: str) -> None:
        relay = Relay(address, self._message_bytes, self._hop_timeout_s, security=self._security)
        relay.observer = self.counters.link(address)
        relay.problem = f"the host at {address} has not been reached yet"
        self._relays[address] = relay
        self._keepers[address] = asyncio.create_task(self._keep(relay))

    def to(self, address: str) -> Relay:
        """The link to a host; with an empty address, the only one. Raises StatusError."""
        if address in self._relays:
            return self._relays[address]
        if not address and len(self._relays) == 1:
            return next(iter(self._relays.values()))
        dialled = ", ".join(self._relays) or "no other host"
        raise failed_precondition(f"no link to {address or 'a single next host'}: this host may send to {dialled}")

    def wake(self) -> None:
        """Open the congestion windows of idle links, as work is on its way here."""
        for relay in self._relays.values():
            relay.wake()

    async def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        await cancelled(self._keepers.values())
        await asyncio.gather(*self._closing, return_exceptions=True)
        await asyncio.gather(*(relay.close() for relay in self._relays.values()))

    async def _keep(self, relay: Relay) -> None:
        """Keep a link checked and warm, forever."""
        warmer: asyncio.Task[None] | None = None
        try:
            while True:
                problem = await self._problem(relay)
                if problem != relay.problem:
                    log.info("link to %s: %s", relay.address, problem or "warm")
                relay.problem = problem
                if not problem and warmer is None and self._keep_warm_s:
                    warmer = asyncio.create_task(relay.keep_warm(self._state_bytes, self._keep_warm_s))
                if problem:
                    await asyncio.sleep(RETRY_S)
                    continue
                review_at = monotonic() + REVIEW_S
                while relay.rtt_ms is not None and monotonic() < review_at:
                    await asyncio.sleep(CHECK_S)
        finally:
            if warmer is not None:
                warmer.cancel()

    async def _problem(self, relay: Relay) -> str:
        """Why a link cannot be used; empty when it can."""
        try:
            other = await relay.describe(timeout=min(self._hop_timeout_s, WARM_TIMEOUT_S))
            problem = self._wiring(relay.address, other)
            if not problem and (relay.problem or relay.rtt_ms is None):
                await relay.open_up()
        except StatusError as refusal:
            return refusal.message
        return problem


# Events kept for a router that does not read them; later ones are dropped, and its requests end at their deadline.
MAX_WAITING, MAX_WAITING_BYTES = 4096, 64 << 20

MAX_TOGETHER = 256  # events in one message
TOGETHER_BYTES = 1 << 20  # beyond this, no further event joins a message
EVENTS_BYTES = 16 << 20  # limit of a message of events: twice the largest pictures that are drawn together


class _Events(asyncio.Queue[stage_pb2.Event]):
    """Events that wait for a router, their size in bytes, and the key of its vouchers."""

    bytes = 0
    key = b""


class Subscribers:
    """The routers that listen on a host for results and faults, each with a bounded queue of events."""

    def __init__(self) -> None:
        self.queues: dict[str, _Events] = {}

    def key(self, router: str) -> bytes | None:
        """The key that a router gave for its vouchers, possibly empty; None if the router does not listen."""
        queue = self.queues.get(router)
        return queue.key if queue is not None else None

    async def listen(self, router: str, key: bytes = b"") -> AsyncGenerator[stage_pb2.Events, None]:
        """Events for `router`, batched when several are ready; the first message is empty.

        A second subscription of the same name takes over from the first.
        """
        queue = _Events(MAX_WAITING)
        queue.key = key
        self.queues[router] = queue
        try:
            yield stage_pb2.Events()
            while True:
                events = stage_pb2.Events(events=[event := await queue.get()])
                size = event.ByteSize()
                while len(events.events) < MAX_TOGETHER and size < TOGETHER_BYTES and not queue.empty():
                    events.events.append(event := queue.get_nowait())
                    size += event.ByteSize()
                queue.bytes -= size
                yield events
        finally:
            if self.queues.get(router) is queue:
                del self.queues[router]

    def publish(self, router: str, event: stage_pb2.Event) -> None:
        queue = self.queues.get(router)
        if queue is None or queue.full() or queue.bytes > MAX_WAITING_BYTES:
            log.warning("dropping an event of session %s: router %s is not reading", event.session, router)
            return
        queue.bytes += event.ByteSize()
        queue.put_nowait(event)
