"""Targets `stage` and `router`: every call of the two servers, and their ports themselves."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message

from onesweep.loadtest.fuzz.base import FuzzTarget, RawCaller, all_of, garbage
from onesweep.loadtest.fuzz.healthy import Captures
from onesweep.loadtest.fuzz.inputs import Inputs
from onesweep.loadtest.fuzz.inside import Refresh
from onesweep.loadtest.fuzz.testbed import FuzzTestbed
from onesweep.serving.v1 import router_pb2
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import PROTOCOL

STAGE_SERVICE = "/stages.v1.StageService"
ROUTER_SERVICE = "/serving.v1.RouterService"
HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MOST_HOPS = 8  # of a batch
EVENTS_S = 600.0
BRIEF_S = 2.0  # deadline of an answer that has no end of its own
ROUTER_BRIEF_S = 2.5  # longer than the longest request that is still right takes on a busy machine
AUTHORIZATIONS = ("", "Bearer", "Bearer ", "Basic x", "bearer y", "Bearer " + "z" * 3000)
PATIENT = 50  # messages of an answer; the rest is left


class StageTarget(FuzzTarget):
    """Every call of a stage server."""

    name = "stage"

    def __init__(self, testbed: FuzzTestbed, captures: Captures, rng: random.Random) -> None:
        super().__init__()
        self.testbed, self.rng = testbed, rng
        self.callers = [RawCaller(address, self.tally) for address in testbed.hosts]
        self.refresh = Refresh(rng, "", testbed.hosts)

        def inputs(kind: type, method: str) -> Inputs:
            return Inputs(kind, captures.requests[method], rng, self.refresh)

        self.hops = Inputs(stage_pb2.Hop, captures.hops, rng, self.refresh)
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

    async def _send_to(self, caller: RawCaller, count: int) -> None:
        pushed, few = count * 3 // 4, max(count // 50, 1)
        calls: list[Awaitable[object]] = [
            self._push(caller, parcels) for parcels in self._streams(self.hops.take(pushed))
        ]
        for method, inputs in self.others.items():
            calls += [
                caller.unary(f"{STAGE_SERVICE}/{method}", data)
                for data in inputs.take(few * (1 if method == "Probe" else 2))
            ]
        calls += [caller.read(f"{STAGE_SERVICE}/Subscribe", data, 1, BRIEF_S) for data in self.subscriptions.take(few)]
        calls += [caller.unary(HEALTH[0], self.rng.randbytes(self.rng.randrange(20))) for _ in range(few)]
        calls += [caller.read(HEALTH[1], self.rng.randbytes(self.rng.randrange(9)), 1, BRIEF_S) for _ in range(few)]
        calls += [caller.stream(REFLECTION, [self.rng.randbytes(12)], 1) for _ in range(few)]
        calls += [garbage(self.testbed.hosts[self.callers.index(caller)], self.rng, self.tally) for _ in range(few)]
        self.tally.inputs += pushed + len(calls)
        self.rng.shuffle(calls)  # so that calls of all kinds are under way together
        await all_of(calls)

    def _streams(self, hops: list[bytes]) -> list[list[bytes]]:
        """Parcels of some hops each, and some parcels to a stream; a hop that cannot be parsed goes by itself."""
        streams: list[list[bytes]] = []
        parcels: list[bytes] = []
        parcel = stage_pb2.HopBatch(number=1, protocol=PROTOCOL)
        for data in hops:
            try:
                parcel.hops.add().ParseFromString(data)
            except DecodeError:
                del parcel.hops[-1]
                streams.append([data])
                continue
            if len(parcel.hops) >= self.rng.randint(1, MOST_HOPS):
                parcels.append(parcel.SerializeToString())
                number = self.rng.choice((parcel.number + 1, parcel.number, (1 << 64) - 1)) % (1 << 64)
                parcel = stage_pb2.HopBatch(number=number, protocol=PROTOCOL)
            if len(parcels) >= self.rng.randint(1, 6):
                streams.append(parcels)
                parcels = []
        return [*streams, [*parcels, parcel.SerializeToString()]]

    async def _push(self, caller: RawCaller, parcels: list[bytes]) -> None:
        """Most read all receipts; some leave them, and some never end their stream."""
        way = self.rng.random()
        most = len(parcels) if way < 0.8 else self.rng.randrange(len(parcels) + 1)
        for data in await caller.stream(f"{STAGE_SERVICE}/Push", parcels, most, is_half=way > 0.9):
            self.tally.rejections(stage_pb2.Ack.FromString(data), parcels[0])

    async def _listen(self, caller: RawCaller) -> None:
        request = stage_pb2.SubscribeRequest(router=self.refresh.router).SerializeToString()
        call: Any = caller.channel.unary_stream(f"{STAGE_SERVICE}/Subscribe")
        async for data in call(request, timeout=EVENTS_S):
            self.tally.events(stage_pb2.Events.FromString(data))


class RouterTarget(FuzzTarget):
    """Every call of the router, with metadata of all sorts."""

    name = "router"

    def __init__(self, testbed: FuzzTestbed, captures: Captures, rng: random.Random) -> None:
        super().__init__()
        self.testbed, self.rng = testbed, rng
        self.caller = RawCaller(testbed.router, self.tally)
        self.requests = {
            "Generate": Inputs(router_pb2.GenerateRequest, captures.requests["Generate"], rng, self._small),
            "Draw": Inputs(router_pb2.DrawRequest, captures.requests["Draw"], rng),
        }
        self.status = Inputs(router_pb2.StatusRequest, captures.requests["Status"], rng)

    async def send(self, count: int) -> None:
        few = max(count // 20, 1)
        calls: list[Awaitable[object]] = [
            self.caller.read(
                f"{ROUTER_SERVICE}/{method}",
                data,
                self.rng.choice((0, 1, PATIENT, PATIENT)),
                self.rng.choice((0.001, 0.3, ROUTER_BRIEF_S)),
                self._metadata(),
            )
            for method, inputs in self.requests.items()
            for data in inputs.take(max((count - 2 * few) // len(self.requests), 1))
        ]
        calls += [self.caller.unary(f"{ROUTER_SERVICE}/Status", data) for data in self.status.take(few)]
        ports = [garbage(self.testbed.router, self.rng, self.tally) for _ in range(few)]
        self.tally.inputs += len(calls) + len(ports)
        await all_of([*calls, *ports])

    async def close(self) -> None:
        await self.caller.close()

    def _small(self, message: Message) -> None:
        """Keep a request that is still right after its mutation from taking seconds."""
        assert isinstance(message, router_pb2.GenerateRequest)
        most = self.rng.randint(1, 8)
        message.max_bytes = min(message.max_bytes, most)
        if message.HasField("max_tokens"):
            message.max_tokens = min(message.max_tokens, most)

    def _metadata(self) -> Sequence[tuple[str, str | bytes]]:
        rng = self.rng
        return rng.choice(
            (
                (),
                (),
                (("authorization", rng.choice(AUTHORIZATIONS)),),
                (("x-bin", rng.randbytes(rng.randrange(64))), ("onesweep-request", "other")),
                tuple((f"k{n}", "v" * 10) for n in range(rng.randrange(60))),
            )
        )
