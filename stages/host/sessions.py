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
from stages.wire.status import StatusError, already_exists, exhausted, failed_precondition, invalid, not_found

REMEMBERED = 4096  # names of released sessions that are kept: work for one of them may still be on its way


@dataclass
class HostSession:
    """State of one request on a host."""

    router: str
    kind: ModelKind
    capacity: int
    bytes: int
    expires_at: float
    parts: Parts  # that it began with: it ends with them, whatever is loaded since
    path: tuple[str, ...] = ()  # of all of its hops
    sender: str = ""  # the host whose hops it gets, by its certificate; empty while there was none
    pending: int = 0  # hops accepted and not computed yet: a session with such does not expire
    length: int = 0  # clean positions accepted so far, those still in the queue included
    next_number: int = 0  # the sweep or step that is due
    prefills: int = 0  # prefill hops of it that were accepted so far
    batches: int = 0  # batches of its candidates, likewise
    # Hidden state of the last known token, (1, width), on the last host: later batches of candidates follow it, too.
    last_known: Tensor | None = None
    # Of those, by host, on the host where they end.
    timings: list[stage_pb2.HopTiming] = field(default_factory=list)
    free_at: float = 0.0  # when the last hop that was computed ended, by the performance counter
    stepped_at: float = 0.0  # when its last AR step ended, by the monotonic clock
    released: bool = False  # nobody waits for it any more. Read by the engine's thread.
    # Of each part that this host holds, in their order.
    caches: dict[int, list[LayerCache]] = field(default_factory=dict)
    # What the text is held to, on the last host.
    grammar: Grammar | None = None
    extra_bytes: int = 0  # of what its work takes beside the caches, as far as it is counted
    # The text so far: (capacity,), of which as many as the caches hold are known.
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    beginning: Beginning | None = None  # where the beginning of its text may be kept
    draft: DraftState | None = None  # of a host that drafts for it
    written: Candidates | None = None  # of the last host's drafter, on their way round the ring

    def accepted(self, is_prefill: bool, has_more: bool) -> None:
        """Count a hop.

        :param has_more: others of its step follow: of a prefill, or else batches of candidates."""
        if has_more:
            self.prefills += is_prefill
            self.batches += not is_prefill
        else:
            self.prefills = self.batches = 0
            self.next_number += 1

    def add_up(self, event: stage_pb2.Event, is_prefill: bool) -> None:
        """Keep the timings of a prefill that ended here; the event of the next hop with a result gets the sums."""
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
        self.released: OrderedDict[str, None] = OrderedDict()  # the last ones

    def open(
        self, name: str, router: str, kind: ModelKind, capacity: int, parts: Parts, now_s: float, drafts: bool = False
    ) -> HostSession:
        """Make a session's caches. Raises StatusError when the budget does not allow them.

        :param capacity: positions, or pictures that are evaluated at once.
        :param drafts: with the memory that a drafter takes.
        """
        if name in self.sessions:
            raise already_exists(f"session {name!r} is open already")
        if name in self.released:
            raise not_found(f"session {name!r} was released")
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
                    f"no memory on {parts.device} for a session of {capacity} positions ({need} bytes): come back "
                    "later or lower --session-mb",
                    retry_after_ms=1000,
                ) from None
            session.tokens = np.zeros(capacity, dtype=np.int64)
        self.sessions[name] = session
        self.bytes += need
        return session

    def book(self, name: str, extra_bytes: int, now_s: float) -> None:
        """Book what a session's work takes beside its caches, once. Raises StatusError where the budget has no room:
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
                f"{self.budget_bytes} free; come back later or raise --session-mb",
                retry_after_ms=1000,
            )

    def due(self, name: str, kind: ModelKind, number: int, start: int, batch: int = 0) -> HostSession:
        """The session that a sweep or step continues with.

        Raises StatusError: NOT_FOUND for an unknown one, ALREADY_EXISTS for a sweep seen before, and
        FAILED_PRECONDITION for one that skips something.
        """
        session = self.sessions.get(name)
        if session is None:
            raise not_found(
                f"unknown session {name!r}: its lease ran out or this host was restarted; start the request again",
            )
        if session.kind != kind:
            raise invalid(f"session {name!r} is of the {session.kind} model, not of {kind}")
        if number < session.next_number:
            raise already_exists(f"sweep {number} of session {name!r} was accepted before")
        if number > session.next_number:
            raise failed_precondition(f"sweep {number} of session {name!r} came before sweep {session.next_number}")
        if batch < session.batches:
            raise already_exists(f"batch {batch} of step {number} of session {name!r} was accepted before")
        if batch > session.batches or (batch and start < session.length):
            raise failed_precondition(
                f"batch {batch} of step {number} of session {name!r} at {start} came where batch {session.batches} at "
                f"{session.length} is due"
            )
        if session.prefills and start < session.length:
            raise already_exists(f"the piece of sweep {number} of session {name!r} at {start} was accepted before")
        # a step may go back behind draft tokens that turned out wrong
        if start > session.length or (start < session.length and kind == "chain"):
            raise failed_precondition(
                f"session {name!r} has read {session.length} positions, the sweep continues at {start}"
            )
        return session

    def renew(self, session: HostSession, now_s: float) -> None:
        """Begin a session's lease again."""
        session.expires_at = now_s + self.lease_s

    def release(self, name: str) -> bool:
        """Free a session; False when there was none. Either way it cannot be opened any more."""
        self.released[name] = None
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
