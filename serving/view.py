"""The ring as the requests of one release see it: hosts that hold its weights, and no others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from serving.accounting import Account
from serving.link import Weights
from serving.ring import RETRY_S, Ring
from serving.session import Session
from stages.alphabet import BYTES, Alphabet
from stages.refusal import Refusal
from stages.sessions import KINDS, Kind
from stages.v1 import stage_pb2

FOUND_S = 0.02
"""How long a look for a way through all hosts holds good: one request asks a dozen times."""


class RingView:
    """A ring and one set of weights: what modes work with, so that whatever a request does, it does with these."""

    def __init__(self, ring: Ring, weights: Weights | None = None) -> None:
        """:param weights: None = those that the hosts turn out to hold, until `pin`."""
        self.ring, self.settings = ring, ring.settings
        self._weights, self.pinned = weights or (), weights is not None
        self._found: Weights | None = None
        self._found_until, self._seen = 0.0, -1

    @property
    def weights(self) -> Weights:
        """Digests in the order of KINDS. Meaningful while there is no `problem`, or once they are pinned."""
        return self._usable() or self._weights

    def pin(self) -> None:
        """Stay with these weights, whatever the hosts come to hold."""
        self._usable()
        self.pinned, self._seen = bool(self._weights), -1

    def unpin(self) -> None:
        """Prefer these weights, but use what the hosts have."""
        self.pinned, self._seen = False, -1

    @property
    def problem(self) -> str:
        """Why requests cannot be served now; empty when they can."""
        if self._usable() is not None:
            return ""
        return self.ring.problem_of(self._weights if self.pinned else None)

    async def usable(self, wait_s: float) -> None:
        """Return when requests can be served. Raises Refusal with the problem and how long it was waited for."""
        waited = 0.0
        while problem := self.problem:
            if waited >= wait_s:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{problem} (waited {wait_s:.1f} s)")
            await asyncio.sleep(RETRY_S)
            waited += RETRY_S

    @property
    def release(self) -> str:
        """What the hosts call these weights; empty while none has them."""
        release = self._described()
        return release.name if release else ""

    def model(self, kind: Kind) -> stage_pb2.ModelInfo | None:
        """The hosts' model of a kind, if there is one. Meaningful while there is no `problem`."""
        release = self._described()
        if release is None or not release.HasField(kind):
            return None
        model: stage_pb2.ModelInfo = getattr(release, kind)
        return model

    def digest(self, kind: Kind) -> str:
        return self.weights[KINDS.index(kind)] if self.weights else ""

    def rtts_ms(self) -> list[float | None]:
        """Round trips to the hosts of the way that a request would take now."""
        path = self.ring.choose(self.weights) or self.ring.links
        return [link.relay.least_rtt_ms for link in path]

    @asynccontextmanager
    async def session(
        self, kind: Kind, capacity: int, deadline_unix_ms: int, account: Account
    ) -> AsyncIterator[Session]:
        """A session that is freed on every host at the end, however it ends."""
        model = self.model(kind)
        alphabet = Alphabet(model.vocabulary) if model else BYTES
        async with self.ring.session(kind, self.weights, capacity, deadline_unix_ms, account, alphabet) as session:
            yield session

    def _described(self) -> stage_pb2.Release | None:
        """These weights as a host describes them."""
        weights = self.weights
        return next((link.held[weights] for link in self.ring.links if weights in link.held), None)

    def _usable(self) -> Weights | None:
        """Weights that there is a way for: those used so far, else those that most hosts hold; None where none."""
        if self._seen != self.ring.changes or time.monotonic() > self._found_until:
            self._seen, self._found_until = self.ring.changes, time.monotonic() + FOUND_S
            self._found = self._find()
        return self._found

    def _find(self) -> Weights | None:
        links = [link for link in self.ring.links if not link.problem]
        held = Counter(weights for link in links for weights in reversed(link.held))
        others = [] if self.pinned else [weights for weights, _ in held.most_common()]
        for weights in [self._weights, *others]:
            if weights in held and self.ring.choose(weights) is not None:
                self._weights = weights
                return weights
        return None
