"""The router's side of one host: a warm connection, what the host says of itself, and how busy it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from serving.topology import HostEntry
from stages.relay import Relay
from stages.releases import weights_of
from stages.security import LOOPBACK_ONLY, Security
from stages.sessions import KINDS
from stages.v1 import stage_pb2

RELEASE_TIMEOUT_S = 5.0
RELEASE_AFTER_S = 0.005
"""Pause before sessions are freed: the answer goes out first."""
MOST_OWED = 4096
MESSAGE_BYTES = 64 << 20
SILENT_S = 1.0
"""A host whose answer to the next keep-warm message is so late, and by three round trips, is taken for lost."""
LEARN = 0.1

Weights = tuple[str, ...]
"""Digests of the models that a host holds, in the order of KINDS: hosts with the same can share a request."""


class HostLink:
    """One host as the router sees it."""

    def __init__(self, entry: HostEntry, router: str, hop_timeout_s: float, security: Security = LOOPBACK_ONLY) -> None:
        self.entry, self.router = entry, router
        self.relay = Relay(entry.address, MESSAGE_BYTES, hop_timeout_s, entry.name, security)
        self.info: stage_pb2.DescribeResponse | None = None
        self.held: dict[Weights, stage_pb2.Release] = {}
        """What it has loaded, the newest last."""
        self.problem = f"host {entry.name} at {entry.address} was not reached yet"
        """Why no request can use this host; empty when one can."""
        self.accused = ""
        """What an audit found against it: it gets no work any more."""
        self.sessions = 0
        """Of this router, under way."""
        self.hop_ms = 0.0
        """Running mean of what a hop takes here, waiting included."""
        self.onward: dict[str, stage_pb2.LinkInfo] = {}
        """Its own links, by the address that they lead to."""
        self._owed: list[str] = []
        """Sessions to be freed there."""
        self._releasing = False

    @property
    def parts(self) -> int:
        """Blocks of a whole model, as the host says; 0 while that is not known."""
        releases = self.info.releases if self.info else ()
        return max((getattr(release, kind).parts for release in releases for kind in KINDS), default=0)

    @property
    def load_ms(self) -> float:
        """What a hop may have to wait for here."""
        return self.sessions * self.hop_ms

    def silent_s(self, pause_s: float) -> float | None:
        """How long nothing was heard, if that is too long.

        :param pause_s: between keep-warm messages, whose answers are what is heard.
        """
        if self.relay.answered_at is None:
            return None
        quiet_s = time.monotonic() - self.relay.answered_at
        return quiet_s if quiet_s > pause_s + SILENT_S + 3 * (self.relay.least_rtt_ms or 0.0) / 1000 else None

    def learn(self, passage: stage_pb2.Passage) -> None:
        """Book what a hop took."""
        took_ms = passage.queue_ms + passage.compute_ms
        self.hop_ms += LEARN * (took_ms - self.hop_ms) if self.hop_ms else took_ms

    def hear(self, info: stage_pb2.DescribeResponse) -> None:
        """Take note of what the host says of itself."""
        self.info = info
        self.onward = {link.address: link for link in info.links}
        self.held = {weights_of(release): release for release in info.releases if not release.loading}

    async def describe(self) -> None:
        """Refresh `info` and `problem`. Raises Refusal when the host does not answer."""
        info = await self.relay.describe(timeout=self.relay.hop_timeout_s)
        self.hear(info)
        if self.accused:
            self.problem = f"host {self.entry.name} at {self.entry.address} is taken out: {self.accused}"
        elif tuple(info.blocks) != self.entry.blocks:
            self.problem = (
                f"host {self.entry.name} at {self.entry.address} holds blocks {list(info.blocks)}, "
                f"the topology says {list(self.entry.blocks)}"
            )
        elif not info.ready:
            self.problem = f"host {self.entry.name} is not ready: {info.not_ready_reason}"
        elif not all(0 <= link.rtt_ms < math.inf for link in info.links):
            self.problem = f"host {self.entry.name} measured round trips that cannot be: see what runs there"
        else:
            self.problem = ""

    async def events(self) -> AsyncIterator[stage_pb2.Events]:
        """Messages of the subscription; the first, when it is open, is empty."""
        async for events in self.relay.stub.Subscribe(stage_pb2.SubscribeRequest(router=self.router)):
            yield events

    async def release(self, session: str | None = None) -> None:
        """Free a session, together with others that end at about the same time or could not be freed before."""
        if session is not None:
            self._owed = [*self._owed, session][-MOST_OWED:]
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._owed:
                await asyncio.sleep(RELEASE_AFTER_S)
                owed, self._owed = self._owed, []
                try:
                    await self.relay.stub.Release(stage_pb2.ReleaseRequest(sessions=owed), timeout=RELEASE_TIMEOUT_S)
                except (grpc.aio.AioRpcError, grpc.aio.UsageError):  # it is lost, maybe for a while, or taken out
                    self._owed = [*owed, *self._owed][-MOST_OWED:]
                    return
        finally:
            self._releasing = False
