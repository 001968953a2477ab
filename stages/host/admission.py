"""Admission of hops to a host: accepts hops within the host's limits, finds the session and the weights for each, and
decides what leaves the host once a hop is computed.

This module touches no network and no clock: the host passes in who listens, what is under way, and the time.
"""

from stages.host.parts import Parts, Releases
from stages.host.prefixes import Beginning, PrefixStore, is_vouched
from stages.host.scheduler import HopWork, ScheduledHop, TextWork
from stages.host.sessions import HostSession, SessionStore
from stages.host.settings import HostSettings
from stages.host.validation import parse_hop
from stages.host.work.pictures import PictureWork
from stages.host.work.read import ReadWork
from stages.model.prefill import MAX_PREFILL_CHUNKS, prefix_root
from stages.v1 import stage_pb2
from stages.wire.messages import Outcome, forward, summed
from stages.wire.status import exhausted, failed_precondition, invalid, permission_denied, unavailable


class HopAdmission:
    """A host's decisions on a hop, before and after it computes the hop."""

    def __init__(
        self, settings: HostSettings, releases: Releases, sessions: SessionStore, prefixes: PrefixStore
    ) -> None:
        self.settings, self.releases, self.sessions, self.prefixes = settings, releases, sessions, prefixes
        self.parse = parse_hop
        self.stopping = False  # no new session may open
        self.queued_bytes = 0  # of the messages of hops under way

    def admit(
        self, hop: stage_pb2.Hop, received_bytes: int, sender: str, key: bytes | None, is_full: bool, now_s: float
    ) -> ScheduledHop:
        """Give a hop its session. Raises StatusError, and then nothing has changed.

        :param sender: the host that sent it; empty for a router, and without TLS.
        :param key: the router's voucher key; None if the router does not listen here.
        :param is_full: the limit on hops under way is reached."""
        session = self.sessions.sessions.get(hop.session)
        if session is not None:
            if (session.router, session.path) != (hop.router, tuple(hop.path)):
                raise permission_denied("this session belongs to another router or path")
            if sender and session.sender not in ("", sender):
                raise permission_denied(f"this session's hops must come from {session.sender}")
        # a session keeps the weights that it began with
        parts = self.releases.parts_for(hop.digest) if session is None else session.parts
        work = self.parse(hop, parts.plan, is_open=session is not None)
        if key is None:
            raise failed_precondition(f"router {hop.router!r} has not subscribed to this host: subscribe first")
        if is_full and (session is None or not session.prefills + session.batches):
            raise exhausted(f"{self.settings.name} has {self.settings.queue_limit} hops in flight", retry_after_ms=500)
        limit = self.settings.queue_mb << 20
        # the queue limit counts steps, and one step may have a thousand batches
        if self.queued_bytes and self.queued_bytes + received_bytes > limit:
            raise exhausted(
                f"{self.settings.name} has no memory for another message of {received_bytes} bytes: "
                f"{self.queued_bytes} of {limit} are in flight; "
                "try again later, with fewer candidates if there are many",
                retry_after_ms=500,
            )
        if isinstance(work, PictureWork):  # no state is kept between their hops, so any hop may open the session
            opens, capacity = session is None, work.plan.evaluations
        else:
            assert isinstance(work, TextWork)
            extra_bytes = work.extra_bytes(parts, hop.capacity if session is None else session.capacity)
            opens, capacity = work.start == 0 or bool(hop.memory.prefix), hop.capacity
        session = self._open(hop, work, parts, capacity, key, now_s) if opens else self._expected_session(hop, work)
        if isinstance(work, TextWork):
            self.sessions.book(hop.session, extra_bytes, now_s)
            session.length = work.start + work.remembered
        if sender:  # only one host forwards hops of a session to this one
            session.sender = sender
        session.accepted(work.is_prefill, work.has_more)
        session.pending += 1
        self.queued_bytes += received_bytes
        return ScheduledHop(work, session, received_bytes, now_s + hop.left_s)

    def computed(self, job: ScheduledHop, outcome: Outcome, now_s: float) -> list[Outcome]:
        """Book a computed hop. Returns what the host sends on, in order; nothing once the session is released."""
        work, session, result = job.work, job.session, job.work.result
        if session.beginning is not None and isinstance(work, ReadWork):  # only what was computed can be kept
            clean = session.vocabulary.cut(work.hop.read.clean, 0, work.at_once)
            session.beginning.read(work.start, work.lengths, clean, session.vocabulary)
        carrier = outcome if result is None else result
        if isinstance(carrier, stage_pb2.Event):
            carrier.timings.extend(work.hop.timings)
        carrier.timings.add(
            host=self.settings.name,
            queue_ms=job.queue_ms,
            compute_ms=job.compute_ms,
            received_bytes=job.received_bytes,
        )
        if isinstance(outcome, stage_pb2.Hop):
            forward(outcome)
        if isinstance(work, PictureWork):
            timings = summed(outcome.timings)  # a trajectory passes every host at each of its levels
            del outcome.timings[:]
            outcome.timings.extend(timings)
        if isinstance(outcome, stage_pb2.Event):
            session.add_up(outcome, work.is_prefill)
        if result is not None:
            session.add_up(result, is_prefill=False)
        self.sessions.renew(session, now_s)
        if work.is_step:
            session.stepped_at = now_s
        if session.released:
            return []
        if isinstance(outcome, stage_pb2.Event):  # the result comes with the last hop of the step, not with a prefill
            return [] if work.is_prefill else [outcome]
        # the next step starts first: the user waits for its trip round the ring
        return [outcome] if result is None else [outcome, result]

    def _open(
        self, hop: stage_pb2.Hop, work: HopWork, parts: Parts, capacity: int, key: bytes, now_s: float
    ) -> HostSession:
        if self.stopping:
            raise unavailable(f"{self.settings.name} is stopping")
        beginning, memory = None, hop.memory
        if hop.HasField("memory"):
            vouched = is_vouched(hop, key)
            root = prefix_root(memory.space, hop.digest, hop.read.codec)
            kept = Beginning(root, tuple(memory.hosts[: hop.place]) if vouched else ())
            if memory.prefix:
                # without a voucher, the prefix counts as not found
                self.prefixes.find(memory.prefix if vouched else b"", kept, hop.read.start)
            beginning = kept if vouched else None
        session = self.sessions.open(hop.session, hop.router, work.kind, capacity, parts, now_s, work.drafts)
        session.next_number = work.number  # a replay starts where another host's session ended
        session.beginning, session.path = beginning, tuple(hop.path)
        return session

    def _expected_session(self, hop: stage_pb2.Hop, work: TextWork | PictureWork) -> HostSession:
        if isinstance(work, PictureWork):
            session = self.sessions.expected_session(hop.session, work.kind, work.number, 0)
            if (needed := work.plan.evaluations) > session.capacity:
                raise invalid(f"the session was opened for {session.capacity} pictures at once, not {needed}")
            return session
        session = self.sessions.expected_session(hop.session, work.kind, work.number, work.start, hop.read.score.batch)
        # a hop may claim another capacity than the one that opened the session
        if work.start + work.positions > session.capacity:
            raise invalid(f"the session holds only {session.capacity} positions")
        if work.is_prefill and session.prefills + 1 >= MAX_PREFILL_CHUNKS:
            raise invalid(f"a step can have at most {MAX_PREFILL_CHUNKS} pieces")
        return session
