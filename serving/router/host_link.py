"""The router's link to a host, and a request's session on the hosts of one path."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from serving.router.topology import HostEntry
from stages.clock import monotonic
from stages.host.next_hosts import EVENTS_BYTES
from stages.host.plan import MODEL_KINDS, weights_of
from stages.host.prefixes import LISTED_BYTES, MAX_LISTED, path_digest, piece_key, voucher
from stages.limits import MAX_RELEASES
from stages.v1 import stage_pb2
from stages.wire.hop_stream import Relay
from stages.wire.messages import results_of
from stages.wire.status import StatusError, internal
from stages.wire.tls import LOOPBACK_ONLY, Security, ending

RELEASE_TIMEOUT_S = 5.0
RELEASE_AFTER_S = 0.005  # Pause before sessions are freed, so that the answer leaves first.
MAX_UNRELEASED = 4096  # Sessions that a lost host still has to free; older ones end there with their leases.
MESSAGE_BYTES = 64 << 20
# A host counts as lost when its answer to a keep-warm message is late by this, by three round trips, and by twice its
# recent delay or the pause that it reports, whichever is longer. gRPC's own keepalive needs at least 15 s with the
# settings that servers accept.
SILENT_S = 1.0
# Limits on a host's description of itself.
MAX_BLOCKS, MAX_HOSTS = 1024, 64
CLOCK_LIMIT_S = 0.5  # `status` names clocks that differ by more: certificates and logs depend on them.
ONE_AT_A_TIME = "it computes requests one at a time: on its processor, a result would depend on others in the batch"
NEW_SHARE = 0.1  # Weight of a new time in the running mean of a host's times.

# Digests of the models that a host holds, in the order of KINDS: hosts with equal digests can share a request.
Weights = tuple[str, ...]


class HostLink:
    """One host as the router sees it."""

    def __init__(
        self, entry: HostEntry, hop_timeout_s: float, security: Security = LOOPBACK_ONLY, relay: Relay | None = None
    ) -> None:
        """:param relay: the way there; None: a connection of its own. Raises InputError if it may not be dialled."""
        self.entry = entry
        self.relay = relay or Relay(entry.address, MESSAGE_BYTES, hop_timeout_s, entry.name, security, EVENTS_BYTES)
        self.info: stage_pb2.DescribeResponse | None = None
        self.parts = 0  # blocks of the whole model, as the host reports; 0 while unknown
        self.held: dict[Weights, stage_pb2.Release] = {}  # loaded releases, the newest last
        # Why no request can use this host; empty when one can.
        self.problem = f"host {entry.name} at {entry.address} has not been reached yet"
        # When it stopped answering, by the monotonic clock, if no joining machine takes its place; None: it answers.
        self.lost_at: float | None = None
        self.returning_at = -math.inf  # when it last reported that it loads its weights, or stops to start again
        self.warnings: tuple[str, ...] = ()  # to fix while requests still use the host; empty where all is well
        # The finding of an audit, and the monotonic time until which the host gets no work.
        self.quarantined, self.quarantined_until = "", 0.0
        self.sessions = 0  # this router's open sessions
        self.hop_ms = 0.0  # running mean of a hop's time here, queueing included
        self.key = b""  # signs vouchers; new with each subscription
        # Digests in its prefix cache, and the version of that list.
        self.prefixes = frozenset[bytes]()
        self.prefix_version = 0
        self.onward: dict[str, stage_pb2.LinkInfo] = {}  # the host's own links, by target address
        self._unreleased: list[str] = []  # sessions still to be freed there
        self._releasing = False

    @property
    def instance(self) -> str:
        """Name of the host's process, as the host reports it."""
        return self.info.instance if self.info else ""

    def silent_s(self) -> float | None:
        """Seconds without an answer to a keep-warm message; None while that is no cause for alarm."""
        if self.relay.asked_at is None:
            return None
        quiet_s = monotonic() - self.relay.asked_at
        usual_s = SILENT_S + 3 * (self.relay.min_rtt_ms or 0.0) / 1000
        late_s = max(self.relay.late_ms, self.info.stall_ms if self.info else 0) / 1000
        # Never longer than the wait for a description, whatever pause the host reports.
        return quiet_s if quiet_s > max(usual_s, min(usual_s + 2 * late_s, self.relay.hop_timeout_s)) else None

    def record(self, timing: stage_pb2.HopTiming) -> None:
        """Add a hop's time to the running mean."""
        took_ms = timing.queue_ms + timing.compute_ms
        self.hop_ms += NEW_SHARE * (took_ms - self.hop_ms) if self.hop_ms else took_ms

    def update(self, info: stage_pb2.DescribeResponse) -> None:
        """Store the host's description of itself. Raises StatusError for one that no sound host sends."""
        sizes = len(info.blocks), len(info.links), len(info.releases)
        if any(size > most for size, most in zip(sizes, (MAX_BLOCKS, MAX_HOSTS, MAX_RELEASES), strict=True)):
            raise internal("it names {} blocks, {} links and {} releases".format(*sizes))
        self.info = info
        self.parts = max((getattr(each, kind).parts for each in info.releases for kind in MODEL_KINDS), default=0)
        self.onward = {link.address: link for link in info.links}
        self.held = {weights_of(release): release for release in info.releases if not release.loading}

    def update_prefixes(self, listed: stage_pb2.PrefixList) -> None:
        """Store the host's list of cached prefixes."""
        if listed.version != self.prefix_version:
            keys = listed.digests[: MAX_LISTED * LISTED_BYTES]  # once: each access to the field copies it
            self.prefixes = frozenset(keys[at : at + LISTED_BYTES] for at in range(0, len(keys), LISTED_BYTES))
            self.prefix_version = listed.version

    def forget_prefixes(self) -> None:
        """Assume an empty prefix cache until the host sends its list again."""
        self.prefixes, self.prefix_version = frozenset(), 0

    def kept(self, prefixes: Sequence[bytes], before: Sequence[str] = ()) -> int:
        """Number of `prefixes` that the host caches; they are digests of a text's beginnings, the shortest first.

        :param before: instances of the preceding hosts on the path."""
        path = path_digest(before)
        lacking = (i for i, each in enumerate(prefixes) if piece_key(each, path)[:LISTED_BYTES] not in self.prefixes)
        return next(lacking, len(prefixes))

    async def describe(self, sessions: Iterable[str] = (), faulty: Iterable[str] = ()) -> None:
        """Refresh `info`, `problem` and the leases of `sessions`. Raises StatusError if the host does not answer."""
        begin = time.time()
        info = await self.relay.describe(self.relay.hop_timeout_s, self.prefix_version, sessions, faulty)
        self.update(info)
        if self.problem:  # messages that it has not answered since then count as silence no longer
            self.relay.asked_at = None
        self.lost_at = None
        if not info.ready and not (self.held and info.links and all(each.problem for each in info.links)):
            self.returning_at = monotonic()  # a host that waits for the next one does not return by itself
        clock = clock_warning(info.unix_us / 1e6, begin, time.time()) if info.unix_us else ""
        self.warnings = (clock, ending(info.certificate_until_s), ONE_AT_A_TIME if info.one_at_a_time else "")
        self.update_prefixes(info.prefixes)
        if monotonic() >= self.quarantined_until:
            self.quarantined = ""
        if self.quarantined:
            self.problem = f"host {self.entry.name} at {self.entry.address} is quarantined: {self.quarantined}"
        elif tuple(info.blocks) != self.entry.blocks:
            self.problem = (
                f"host {self.entry.name} at {self.entry.address} holds blocks {list(info.blocks)}, "
                f"the topology says {list(self.entry.blocks)}: restart it (machines that joined follow by themselves)"
            )
        elif not info.ready:
            self.problem = f"host {self.entry.name} is not ready: {info.not_ready_reason}"
        elif not all(0 <= link.rtt_ms < math.inf for link in info.links):
            self.problem = f"host {self.entry.name} reported impossible round trips: check what runs there"
        else:
            self.problem = ""

    async def release(self, session: str | None = None) -> None:
        """Free a session, together with others that end at about the same time or are still owed."""
        if session is not None:
            self._unreleased = [*self._unreleased, session][-MAX_UNRELEASED:]
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._unreleased:
                await asyncio.sleep(RELEASE_AFTER_S)
                unreleased, self._unreleased = self._unreleased, []
                try:
                    request = stage_pb2.ReleaseRequest(sessions=unreleased, prefixes=self.prefix_version)
                    released = await self.relay.stub.Release(request, timeout=RELEASE_TIMEOUT_S)
                    self.update_prefixes(released.prefixes)  # a chat's next turn may arrive before the next description
                except (grpc.aio.AioRpcError, grpc.aio.UsageError):  # it is lost, maybe for a while, or quarantined
                    self._unreleased = [*unreleased, *self._unreleased][-MAX_UNRELEASED:]
                    return
        finally:
            self._releasing = False


def clock_warning(clock_s: float, begin_s: float, end_s: float) -> str:
    """A sentence about a clock that read `clock_s` between two moments of this machine's (Unix seconds); empty if
    they agree."""
    off_s = clock_s - (begin_s + end_s) / 2
    if abs(off_s) - (end_s - begin_s) / 2 <= CLOCK_LIMIT_S:
        return ""
    return (
        f"its clock is off by {off_s:+.1f} s: logs do not match, and certificates may be refused; "
        "run NTP (timedatectl set-ntp true)"
    )


HostPath = tuple[HostLink, ...]


@dataclass(eq=False)
class Attempt:
    """A session on the hosts of one path: work goes to the first, and `receive` gets the events of all of them."""

    path: HostPath
    receive: Callable[[Attempt, stage_pb2.Event], object]
    name: str = field(default_factory=lambda: secrets.token_hex(16))  # the session's name on the hosts
    unread: int = 0  # events that arrived and were not read yet
    # Results of the current step, and those of its batches that arrived.
    results: int = 1
    batches: list[stage_pb2.Event] = field(default_factory=list)
    # Tokens expected in the hosts' prefix caches, until the first result confirms it.
    recalled: int = 0
    replays: bool = False  # it rereads a text that other hosts had read, and has no result yet

    def memory(self, space: bytes, prefix: bytes = b"") -> stage_pb2.Memory | None:
        """The place of its text in the hosts' prefix caches, with a voucher for each; None if a host names no instance.

        :param prefix: digest of the cached tokens."""
        hosts = [link.instance for link in self.path]
        if not all(hosts):
            return None
        vouchers = (voucher(link.key, self.name, space, hosts[:at]) for at, link in enumerate(self.path))
        return stage_pb2.Memory(space=space, prefix=prefix, hosts=hosts[:-1], vouchers=b"".join(vouchers))

    def send(self, hops: Sequence[stage_pb2.Hop]) -> None:
        """Send the hops of a sweep or step; a hop that the first host does not take becomes a fault."""
        first, self.results, self.batches = self.path[0], results_of(hops), []

        def settled(error: StatusError | None) -> None:
            if error is not None:
                self.fail(stage_pb2.Fault(code=error.number, message=error.message, lost=first.entry.address))

        for hop in hops:
            first.relay.send(hop, settled)

    def fail(self, fault: stage_pb2.Fault) -> None:
        self.receive(self, stage_pb2.Event(session=self.name, fault=fault))
