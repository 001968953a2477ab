"""Sessions: KV caches under leases, within a byte budget."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import grpc

from stages.alphabet import Alphabet
from stages.ar import new_caches
from stages.layers import LayerCache
from stages.manifest import Manifest
from stages.parts import Parts, session_bytes
from stages.refusal import Refusal, exhausted, failed_precondition, invalid
from stages.v1 import stage_pb2

Kind = Literal["chain", "ar", "scorer"]
"""The models that hosts hold parts of."""
KINDS: tuple[Kind, ...] = get_args(Kind)

REMEMBERED = 4096
"""Names of released sessions that are kept: work for one of them may still be on its way."""


@dataclass
class Session:
    """What a host remembers of one request."""

    router: str
    kind: Kind
    capacity: int
    bytes: int
    expires_at: float
    parts: Parts
    """That it began with: it ends with them, whatever is loaded since."""
    pending: int = 0
    """Hops accepted and not computed yet: a session with such does not expire."""
    length: int = 0
    """Clean positions accepted so far, those still in the queue included."""
    next_number: int = 0
    """The sweep or step that is due."""
    pieces: int = 0
    """Hops of it that came: more follow."""
    passages: dict[str, stage_pb2.Passage] = field(default_factory=dict)
    """What these took on each host, where they end."""
    free_at: float = 0.0
    """When the last hop that was computed ended, by the performance counter."""
    released: bool = False
    """Nobody waits for it any more. Read by the engine's thread."""
    caches: dict[int, list[LayerCache]] = field(default_factory=dict)
    """Of each part that this host holds, in their order."""

    def accepted(self, length: int, more: bool) -> None:
        """Book a hop up to position `length`. `more`: that others of its sweep or step follow."""
        self.length = length
        self.pieces = self.pieces + 1 if more else 0
        self.next_number += not more

    def add_up(self, event: stage_pb2.Event, more: bool) -> None:
        """Book what a piece took that ended here; the event of the last one gets what all of them took."""
        if not more and not self.passages:
            return
        for passage in event.passages:
            total = self.passages.setdefault(passage.host, stage_pb2.Passage(host=passage.host))
            total.queue_ms += passage.queue_ms
            total.compute_ms += passage.compute_ms
            total.received_bytes += passage.received_bytes
        del event.passages[:]
        if not more:
            event.passages.extend(self.passages.values())
            self.passages = {}

    @property
    def alphabet(self) -> Alphabet:
        """Of the texts that it reads."""
        return self.parts.alphabet(self.kind)


class SessionStore:
    """All sessions of a host. Not thread-safe: it lives on the event loop."""

    def __init__(self, budget_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_bytes, self.lease_s, self.clock = budget_bytes, lease_s, clock
        self.sessions: dict[str, Session] = {}
        self.bytes = 0
        self._released: OrderedDict[str, None] = OrderedDict()

    def open(self, name: str, router: str, kind: Kind, capacity: int, manifest: Manifest, parts: Parts) -> Session:
        """Make a session's caches. Raises Refusal when the budget does not allow them."""
        if name in self.sessions:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"session {name!r} is open already")
        if name in self._released:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"session {name!r} was released")
        held = parts.held(kind)
        need = session_bytes(manifest, held, capacity)
        self.expire()
        if self.bytes + need > self.budget_bytes:
            raise exhausted(
                f"no memory for another session: {need} bytes needed, {self.budget_bytes - self.bytes} of "
                f"{self.budget_bytes} free; come back later or raise --session-mb",
                retry_after_ms=1000,
            )
        session = Session(router, kind, capacity, need, self.clock() + self.lease_s, parts)
        a = manifest.architecture
        session.caches = {part: new_caches(a.layers_in(part), a, capacity) for part in held}
        self.sessions[name] = session
        self.bytes += need
        return session

    def in_pieces(self, name: str) -> bool:
        """Whether a session waits for more of a step."""
        session = self.sessions.get(name)
        return session is not None and session.pieces > 0

    def due(self, name: str, kind: Kind, number: int, start: int) -> Session:
        """The session that a sweep or step goes on with.

        Raises Refusal: NOT_FOUND for an unknown one, ALREADY_EXISTS for a sweep seen before, and
        FAILED_PRECONDITION for one that skips something.
        """
        session = self.sessions.get(name)
        if session is None:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"unknown session {name!r}: its lease ran out or this host was restarted; start the request again",
            )
        if session.kind != kind:
            raise invalid(f"session {name!r} is of the {session.kind} model, not of {kind}")
        if number < session.next_number:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"sweep {number} of session {name!r} was accepted before")
        if number > session.next_number:
            raise failed_precondition(f"sweep {number} of session {name!r} came before sweep {session.next_number}")
        if session.pieces and start < session.length:
            message = f"the piece of sweep {number} of session {name!r} at {start} was accepted before"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, message)
        # a step may go back behind guesses that turned out wrong
        if start > session.length or (start < session.length and kind == "chain"):
            raise failed_precondition(
                f"session {name!r} has read {session.length} positions, the sweep goes on at {start}"
            )
        return session

    def renew(self, session: Session) -> None:
        """Begin a session's lease again."""
        session.expires_at = self.clock() + self.lease_s

    def release(self, name: str) -> bool:
        """Free a session; False when there was none. Either way it cannot be opened any more."""
        self._released[name] = None
        if len(self._released) > REMEMBERED:
            self._released.popitem(last=False)
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

    def expire(self) -> None:
        """Free the sessions whose lease ran out."""
        now = self.clock()
        for name in [
            name for name, session in self.sessions.items() if session.expires_at <= now and not session.pending
        ]:
            self.release(name)
