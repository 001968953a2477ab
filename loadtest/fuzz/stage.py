"""Target `stage`: every call of a stage server, and its port itself."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable
from typing import Any

from google.protobuf.message import DecodeError

from loadtest.fuzz.calls import FINE_NUMBERS, Caller
from loadtest.fuzz.captures import Captures
from loadtest.fuzz.hops import Refresh
from loadtest.fuzz.inputs import Inputs
from loadtest.fuzz.ports import garbage
from loadtest.fuzz.scene import Scene
from loadtest.fuzz.target import Target, all_of
from stages.v1 import stage_pb2

SERVICE = "/stages.v1.StageService"
HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MOST_HOPS = 8
EVENTS_S = 600.0
BRIEF_S = 2.0


class StageTarget(Target):
    name = "stage"

    def __init__(self, scene: Scene, captures: Captures, rng: random.Random) -> None:
        super().__init__()
        self.scene, self.rng = scene, rng
        self.callers = [Caller(address, self.tally) for address in scene.hosts]
        self.refresh = Refresh(rng, "", scene.hosts)

        def inputs(kind: type, method: str) -> Inputs:
            return Inputs(kind, captures.requests[method], rng, self.refresh)

        self.hops = Inputs(stage_pb2.Hop, captures.hops, rng, self.refresh)
        runs = [stage_pb2.RunRequest(hop=stage_pb2.Hop.FromString(hop)).SerializeToString() for hop in captures.hops]
        self.runs = Inputs(stage_pb2.RunRequest, runs, rng, self.refresh)
        self.others = {
            method: inputs(kind, method)
            for method, kind in (
                ("Describe", stage_pb2.DescribeRequest),
                ("Release", stage_pb2.ReleaseRequest),
                ("Warm", stage_pb2.WarmRequest),
                ("Probe", stage_pb2.ProbeRequest),
            )
        }
        self.subscriptions = inputs(stage_pb2.SubscribeRequest, "Subscribe")

    async def send(self, count: int) -> None:
        # a name for each batch: when it stops listening, hosts forget what was its
        self.refresh.router = f"fuzz.{secrets.token_hex(8)}"
        listening = [asyncio.create_task(self._listen(caller)) for caller in self.callers]
        await asyncio.sleep(0.1)
        try:
            for caller in self.callers:
                await self._send_to(caller, max(count // len(self.callers), 1))
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def close(self) -> None:
        for caller in self.callers:
            await caller.close()

    async def _send_to(self, caller: Caller, count: int) -> None:
        pushed, run, few = count * 13 // 20, count // 10, max(count // 50, 1)
        calls: list[Awaitable[object]] = [
            self._push(caller, parcels) for parcels in self._streams(self.hops.take(pushed))
        ]
        calls += [caller.unary(f"{SERVICE}/Run", data) for data in self.runs.take(run)]
        for method, inputs in self.others.items():
            calls += [
                caller.unary(f"{SERVICE}/{method}", data) for data in inputs.take(few * (1 if method == "Probe" else 2))
            ]
        calls += [caller.read(f"{SERVICE}/Subscribe", data, 1, BRIEF_S) for data in self.subscriptions.take(few)]
        calls += [caller.unary(HEALTH[0], self.rng.randbytes(self.rng.randrange(20))) for _ in range(few)]
        calls += [caller.read(HEALTH[1], self.rng.randbytes(self.rng.randrange(9)), 1, BRIEF_S) for _ in range(few)]
        calls += [caller.stream(REFLECTION, [self.rng.randbytes(12)], 1) for _ in range(few)]
        calls += [garbage(self.scene.hosts[self.callers.index(caller)], self.rng, self.tally) for _ in range(few)]
        self.tally.inputs += pushed + len(calls)
        self.rng.shuffle(calls)
        await all_of(calls)

    def _streams(self, hops: list[bytes]) -> list[list[bytes]]:
        """Parcels of some hops each, and some parcels to a stream; a hop that cannot be parsed goes by itself."""
        streams: list[list[bytes]] = []
        parcels: list[bytes] = []
        parcel = stage_pb2.Parcel(number=1)
        for data in hops:
            try:
                parcel.hops.add().ParseFromString(data)
            except DecodeError:
                del parcel.hops[-1]
                streams.append([data])
                continue
            if len(parcel.hops) >= self.rng.randint(1, MOST_HOPS):
                parcels.append(parcel.SerializeToString())
                parcel = stage_pb2.Parcel(
                    number=self.rng.choice((parcel.number + 1, parcel.number, (1 << 64) - 1)) % (1 << 64)
                )
            if len(parcels) >= self.rng.randint(1, 6):
                streams.append(parcels)
                parcels = []
        return [*streams, [*parcels, parcel.SerializeToString()]]

    async def _push(self, caller: Caller, parcels: list[bytes]) -> None:
        """Most read all receipts; some leave them, and some never end their stream."""
        way = self.rng.random()
        most = len(parcels) if way < 0.8 else self.rng.randrange(len(parcels) + 1)
        for data in await caller.stream(f"{SERVICE}/Push", parcels, most, is_half=way > 0.9):
            for rejection in stage_pb2.Receipt.FromString(data).rejections:
                self.tally.answer(f"rejection {rejection.code}")
                if rejection.code not in FINE_NUMBERS:
                    self.tally.finding(f"a hop is rejected with {rejection.code}: {rejection.message}", parcels[0])

    async def _listen(self, caller: Caller) -> None:
        request = stage_pb2.SubscribeRequest(router=self.refresh.router).SerializeToString()
        call: Any = caller.channel.unary_stream(f"{SERVICE}/Subscribe")
        async for data in call(request, timeout=EVENTS_S):
            for event in stage_pb2.Events.FromString(data).events:
                self.tally.answer(f"event {event.WhichOneof('outcome')}")
                if event.fault.code and event.fault.code not in FINE_NUMBERS:
                    self.tally.finding(f"a fault has code {event.fault.code}: {event.fault.message}")
