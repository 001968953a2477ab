"""Target `host`: a stage server's way with a message, in this process and without sockets."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from onesweep.loadtest.fuzz.base import FuzzTarget
from onesweep.loadtest.fuzz.inputs import Inputs
from onesweep.loadtest.workload.testbed import block_count
from onesweep.stages.host.host import Host, HostSettings
from onesweep.stages.host.next_hosts import NextHosts
from onesweep.stages.host.parts import HostPlan, Release, load_parts, plan_host
from onesweep.stages.host.scheduler import HostObserver
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import PROTOCOL

SETTLE_S = 30.0
ALONE = "127.0.0.1:1"
AHEAD_S = 15.0
FEW = 8  # names of sessions, so that some are met again: replayed, out of order, released


class Refresh:
    """Makes captured hops, alone or in another message, ones that a host would take now."""

    def __init__(self, rng: random.Random, router: str, path: Sequence[str]) -> None:
        """:param router: the name that listens for their results.
        :param path: addresses of the hosts of a sweep."""
        self.rng, self.router, self.path = rng, router, list(path)

    def __call__(self, message: Message) -> None:
        if isinstance(message, stage_pb2.Hop):
            self.hop(message)
        elif isinstance(message, stage_pb2.HopBatch):
            for hop in message.hops:
                self.hop(hop)

    def hop(self, hop: stage_pb2.Hop) -> None:
        hop.router = self.router
        hop.left_s = AHEAD_S
        number = self.rng.randrange(FEW) if self.rng.random() < 0.3 else self.rng.getrandbits(48)
        hop.session = f"{self.router}.{number:x}"
        if hop.path:
            hop.path[:] = self.path
            hop.place = min(hop.place, len(self.path) - 1)


class HostTarget(FuzzTarget):
    """A real host with loaded weights: every part of the model on it, so that hops go round and round in it."""

    name = "host"
    batch_inputs = 500

    def __init__(self, checkpoint: Path, hops: list[bytes], rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.plan: HostPlan = plan_host(checkpoint, tuple(range(block_count(checkpoint))))
        settings = HostSettings("inside", queue_limit=256, session_mb=64)
        links = NextHosts(lambda address, other: "", 0, 0, 1.0, 0.0, HostObserver())
        self.host = Host(Release("fuzz", self.plan, load_parts(self.plan)), settings, links)
        self.refresh = Refresh(rng, "fuzz", [ALONE])
        self.hops = Inputs(stage_pb2.Hop, hops, rng, self.refresh)
        self._worker: asyncio.Task[None] | None = None

    async def send(self, count: int) -> None:
        # a task that fails would only be logged, at the end of the process
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        self._worker = self._worker or asyncio.create_task(self.host.work())
        self.refresh.router = f"fuzz.{secrets.token_hex(8)}"
        listening = asyncio.create_task(self._listen())
        await asyncio.sleep(0)
        for data in self.hops.take(count):
            self._take(data)
            await asyncio.sleep(0)  # the worker takes its turn, so that later hops meet a host at work
        await self._settle()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        self.host.sessions.release_router(self.refresh.router)
        self.tally.inputs += count

    async def close(self) -> None:
        self.host.close()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    def _take(self, data: bytes) -> None:
        try:
            parcel = stage_pb2.HopBatch(hops=[stage_pb2.Hop.FromString(data)], protocol=PROTOCOL)
        except DecodeError:
            self.tally.answer("no message")
            return
        try:
            receipt = self.host.take(parcel)
        except Exception as error:
            self.tally.finding(f"take raises {type(error).__name__}: {error}"[:200], data)
            return
        self.tally.answer("refused" if receipt.rejections else "taken")
        self.tally.rejections(receipt, data)

    async def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while len(self.host.scheduler) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if len(self.host.scheduler):
            self.tally.finding(f"{len(self.host.scheduler)} hops are not done after {SETTLE_S:g} s")

    async def _listen(self) -> None:
        async for events in self.host.subscribers.listen(self.refresh.router):
            self.tally.events(events)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self.tally.finding(f"unhandled: {type(error).__name__}: {error}"[:200])
