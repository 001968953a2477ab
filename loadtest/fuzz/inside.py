"""Targets `admission` and `host`: what a stage server does with a message, in this process and without sockets."""

from __future__ import annotations

import asyncio
import random
import secrets
import time

from google.protobuf.message import DecodeError

from loadtest.fuzz.calls import FINE_NUMBERS
from loadtest.fuzz.hops import Refresh
from loadtest.fuzz.inputs import Inputs
from loadtest.fuzz.target import Target
from serving.shipped import SHIPPED
from stages.admission import check_hop
from stages.host import Host, HostSettings
from stages.links import Links
from stages.meter import HostMeter
from stages.parts import HostPlan, load_parts, plan_host
from stages.refusal import Refusal
from stages.releases import Release
from stages.v1 import stage_pb2

SPANS = ((0,), (1,), (2,), (0, 1), (1, 2))
"""Hosts of other deployments, which see the same hops."""
SLOW_S = 1.0
SETTLE_S = 30.0
ALONE = "127.0.0.1:1"


class AdmissionTarget(Target):
    name = "admission"
    batch_inputs = 2000

    def __init__(self, hops: list[bytes], rng: random.Random) -> None:
        super().__init__()
        self.plans = [plan_host(SHIPPED, span) for span in SPANS]
        self.rng = rng
        self.hops = Inputs(stage_pb2.Hop, hops, rng, Refresh(rng, "fuzz", [ALONE]))

    async def send(self, count: int) -> None:
        for data in self.hops.take(count):
            self._check(data)
        self.tally.inputs += count

    def _check(self, data: bytes) -> None:
        begin = time.thread_time()
        try:
            check_hop(stage_pb2.Hop.FromString(data), self.rng.choice(self.plans))
            self.tally.answer("OK")
        except DecodeError:
            self.tally.answer("no message")
        except Refusal as refusal:
            self.tally.answer(refusal.code.name)
        except Exception as error:
            self.tally.finding(f"check_hop raises {type(error).__name__}: {error}"[:200], data)
        if time.thread_time() - begin > SLOW_S:
            self.tally.finding(f"check_hop takes over {SLOW_S:g} s", data)


class HostTarget(Target):
    """A real host with loaded weights: every part of the model on it, so that hops go round and round in it."""

    name = "host"
    batch_inputs = 500

    def __init__(self, hops: list[bytes], rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.plan: HostPlan = plan_host(SHIPPED, (0, 1, 2))
        settings = HostSettings("inside", queue_limit=256, session_mb=64)
        links = Links(lambda address, other: "", 0, 0, 1.0, 0.0, HostMeter())
        self.host = Host(Release("fuzz", self.plan, load_parts(self.plan)), settings, links)
        self.refresh = Refresh(rng, "fuzz", [ALONE])
        self.hops = Inputs(stage_pb2.Hop, hops, rng, self.refresh)
        self._worker: asyncio.Task[None] | None = None

    async def send(self, count: int) -> None:
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        self._worker = self._worker or asyncio.create_task(self.host.work())
        self.refresh.router = f"fuzz.{secrets.token_hex(8)}"
        listening = asyncio.create_task(self._listen())
        await asyncio.sleep(0)
        for data in self.hops.take(count):
            self._take(data)
            await asyncio.sleep(0)
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
            parcel = stage_pb2.Parcel(hops=[stage_pb2.Hop.FromString(data)])
        except DecodeError:
            self.tally.answer("no message")
            return
        try:
            receipt = self.host.take(parcel)
        except Exception as error:
            self.tally.finding(f"take raises {type(error).__name__}: {error}"[:200], data)
            return
        self.tally.answer("refused" if receipt.rejections else "taken")
        for rejection in receipt.rejections:
            if rejection.code not in FINE_NUMBERS:
                self.tally.finding(f"a hop is rejected with {rejection.code}: {rejection.message}", data)

    async def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while len(self.host.engine) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if len(self.host.engine):
            self.tally.finding(f"{len(self.host.engine)} hops are not done after {SETTLE_S:g} s")

    async def _listen(self) -> None:
        async for events in self.host.subscribers.listen(self.refresh.router):
            for event in events.events:
                self.tally.answer(f"event {event.WhichOneof('outcome')}")
                if event.fault.code and event.fault.code not in FINE_NUMBERS:
                    self.tally.finding(f"a fault has code {event.fault.code}: {event.fault.message}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self.tally.finding(f"unhandled: {type(error).__name__}: {error}"[:200])
