"""Sessions: KV caches under leases, within a byte budget."""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.host.drafter import DraftState
from stages.host.grammar import Grammar
from stages.host.parts import Parts, session_bytes
from stages.host.plan import ModelKind
from stages.host.prefixes import Beginning
from stages.model.layers import LayerCache
from stages.model.pipeline import new_caches
from stages.model.resampling import Candidates
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import summed
from stages.wire.status import Code, StatusError, already_exists, exhausted, failed_precondition, invalid, not_found

REMEMBERED = 4096  # released sessions whose names are kept, as work for them may still be on its way


@dataclass
class HostSession:
    """State of one request on a host."""

    router: str
    kind: ModelKind
    capacity: int
    bytes: int
    expires_at: float
    parts: Parts  # those it began with, which it keeps whatever is loaded later
    path: tuple[str, ...] = ()  # of all its hops
    sender: str = ""  # the host that sends its hops, by its certificate; empty until one has
    pending: int = 0  # hops accepted and not computed yet: a session with any does not expire
    length: int = 0  # clean positions accepted so far, including those still in the queue
    next_number: int = 0  # the sweep or step that is due
    prefills: int = 0  # its prefill hops accepted so far
    batches: int = 0  # batches of its candidates, likewise
    # Hidden state of the last known token, (1, width), on the last host: later batches of candidates also follow it.
    last_known: Tensor | None = None
    # Timings of prefills and batches, by host, on the host where they end.
    timings: list[stage_pb2.HopTiming] = field(default_factory=list)
    free_at: float = 0.0  # when the last hop that was computed ended, by the performance counter
    stepped_at: float = 0.0  # when its last AR step ended, by the monotonic clock
    released: bool = False  # no request waits for it. Read by the engine's thread.
    # One list for each part that this host holds, in order.
    caches: dict[int, list[LayerCache]] = field(default_factory=dict)
    # The grammar that the text is held to, on the last host.
    grammar: Grammar | None = None
    extra_bytes: int = 0  # memory of its work on top of the caches, as far as it is counted
    # The text so far: (capacity,), of which the first entries are known, as many as the caches hold.
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    beginning: Beginning | None = None  # set if the beginning of its text may be kept
    draft: DraftState | None = None  # set on the host that drafts for it
    written: Candidates | None = None  # written by the last host's drafter, on their way round the ring

    def accepted(self, is_prefill: bool, has_more: bool) -> None:
        """Count a hop.

        :param has_more: more hops of its step follow: prefill hops, or batches of candidates."""
        if has_more:
            self.prefills += is_prefill
            self.batches += not is_prefill
        else:
            self.prefills = self.batches = 0
            self.next_number += 1

    def add_up(self, event: stage_pb2.Event, is_prefill: bool) -> None:
        """Keep the timings of a prefill that ended here; the next hop's event with a result gets the sums."""
        if not is_prefill and not self.timings:
            return
        self.timings = summed([*self.timings, *event.timings])
        del event.timings[:]
        if not is_prefill:
            event.timings.extend(self.timings)
            self.timings = []

    @cached_property
    def layers(self) -> list[LayerCache]:
        """Caches of all parts in one list."""
        return [cache for caches in self.caches.values() for cache in caches]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self.parts.plan.models[self.kind].vocabulary


class SessionStore:
    """All sessions of a host. Not thread-safe: it lives on the event loop."""

    def __init__(self, budget_bytes: int, lease_s: float) -> None:
        self.budget_bytes, self.lease_s = budget_bytes, lease_s
        self.sessions: dict[str, HostSession] = {}
        self.bytes = 0
        self.released: OrderedDict[str, bool] = OrderedDict()  # the most recent ones, and whether the request is over

    def open(
        self, name: str, router: str, kind: ModelKind, capacity: int, parts: Parts, now_s: float, drafts: bool = False
    ) -> HostSession:
        """Make a session's caches. Raises StatusError when the budget does not allow them.

        :param capacity: positions, or pictures evaluated at once.
        :param drafts: include the memory of a drafter.
        """
        if name in self.sessions:
            raise already_exists(f"session {name!r} is already open")
        if (is_over := self.released.get(name)) is not None:
            raise StatusError(Code.CANCELLED if is_over else Code.NOT_FOUND, f"session {name!r} was released")
        manifest, held = parts.plan.models[kind].manifest, parts.plan.blocks
        need = session_bytes(manifest, held, capacity)
        if drafts and (drafter := parts.drafter(kind)) is not None:
            need += drafter.session_bytes(capacity)
        self._check_room(need, now_s)
        session = HostSession(router, kind, capacity, need, now_s + self.lease_s, parts)
        if not manifest.draws:
            a = manifest.text_architecture
            try:
                session.caches = {
                    part: new_caches(a.layers_in(part), a, capacity, device=parts.device) for part in held
                }
            except torch.OutOfMemoryError:
                raise exhausted(
                    f"no memory on {parts.device} for a session of {capacity} positions ({need} bytes): try again "
                    "later or lower --session-mb",
                    retry_after_ms=1000,
                ) from None
            session.tokens = np.zeros(capacity, dtype=np.int64)
        self.sessions[name] = session
        self.bytes += need
        return session

    def book(self, name: str, extra_bytes: int, now_s: float) -> None:
        """Book the memory of a session's work on top of its caches, once. Raises StatusError if the budget has no room:
        the session is then freed."""
        session = self.sessions[name]
        if (more := extra_bytes - session.extra_bytes) > 0:
            try:
                self._check_room(more, now_s)
            except StatusError:
                self.release(name)
                raise
            session.extra_bytes = extra_bytes
            session.bytes, self.bytes = session.bytes + more, self.bytes + more

    def _check_room(self, need: int, now_s: float) -> None:
        self.expire(now_s)
        if self.bytes + need > self.budget_bytes:
            raise exhausted(
                f"no memory for another session: {need} bytes needed, {self.budget_bytes - self.bytes} of "
                f"{self.budget_bytes} free; try again later or raise --session-mb",
                retry_after_ms=1000,
            )

    def expected_session(self, name: str, kind: ModelKind, number: int, start: int, batch: int = 0) -> HostSession:
        """The session that a sweep or step continues with.

        Raises StatusError: NOT_FOUND for an unknown one, CANCELLED for one whose request is over, ALREADY_EXISTS for a
        sweep seen before, and FAILED_PRECONDITION for one that skips a number or position.
        """
        session = self.sessions.get(name)
        if session is None:
            if self.released.get(name):
                raise StatusError(Code.CANCELLED, f"session {name!r} was released")
            raise not_found(
                f"unknown session {name!r}: its lease expired or this host was restarted; start the request again",
            )
        if session.kind != kind:
            raise invalid(f"session {name!r} belongs to the {session.kind} model, not to {kind}")
        if number < session.next_number:
            raise already_exists(f"sweep {number} of session {name!r} was already accepted")
        if number > session.next_number:
            raise failed_precondition(f"sweep {number} of session {name!r} arrived before sweep {session.next_number}")
        if batch < session.batches:
            raise already_exists(f"batch {batch} of step {number} of session {name!r} was already accepted")
        if batch > session.batches or (batch and start < session.length):
            raise failed_precondition(
                f"batch {batch} of step {number} of session {name!r} at {start} arrived, but batch {session.batches} "
                f"at {session.length} must come next"
            )
        if session.prefills and start < session.length:
            raise already_exists(f"the piece of sweep {number} of session {name!r} at {start} was already accepted")
        # a step may go back to before rejected draft tokens
        if start > session.length or (start < session.length and kind == "chain"):
            raise failed_precondition(
                f"session {name!r} has read {session.length} positions, but the sweep continues at {start}"
            )
        return session

    def renew(self, session: HostSession, now_s: float) -> None:
        session.expires_at = now_s + self.lease_s

    def release(self, name: str, is_over: bool = False) -> bool:
        """Free a session; False if it did not exist. Either way it cannot be opened again.

        :param is_over: its router needs nothing more of it."""
        self.released[name] = is_over or self.released.get(name, False)
        if len(self.released) > REMEMBERED:
            self.released.popitem(last=False)
        session = self.sessions.pop(name, None)
        if session is None:
            return False
        session.released = True
        self.bytes -= session.bytes
        return True

    def release_router(self, router: str) -> None:
        """Free every session of a router that has gone."""
        for name in [name for name, session in self.sessions.items() if session.router == router]:
            self.release(name)

    def expire(self, now_s: float) -> None:
        """Free the sessions whose lease ran out."""
        for name in [
            name for name, session in self.sessions.items() if session.expires_at <= now_s and not session.pending
        ]:
            self.release(name)
