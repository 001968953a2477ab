"""A host sends its router ten thousand answers that no correct host sends: others lose no text, and the router
stays as it is."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.audit import Quarantine
from serving.router.topology import HostEntry, Topology, local_topology
from stages.clock import monotonic
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import new_server, open_channel
from tests.conftest import started, until, wait_ready
from tests.fuzz.inputs import changed

pytestmark = pytest.mark.slow

MESSAGES = 10_000
MAX_BYTES = 64 << 20
ASK: dict[str, Any] = {"mode": "ar", "max_bytes": 6, "seed": 3}
PROMPT = "The old man went down to the sea. " * 3


class HostileHost(stage_pb2_grpc.StageServiceServicer):
    """Takes an honest host's words, and changes some of them."""

    def __init__(self, honest: str, seed: int) -> None:
        self.honest, self.rng, self.sent = honest, random.Random(seed), 0
        self.sessions = deque(["nobody"], 64)

    def _changed(self, message: Any) -> Any:
        self.sent += 1
        if self.rng.random() < 0.8:
            changed(self.rng, message)
        return message

    async def Describe(self, request: Any, context: Any) -> stage_pb2.DescribeResponse:
        async with open_channel(self.honest) as channel:
            info = await stage_pb2_grpc.StageServiceStub(channel).Describe(request)
        info.name = "hostile"
        if self.rng.random() < 0.2:
            info.prefixes.version = self.rng.getrandbits(60)
            info.prefixes.digests = bytes(self.rng.choice((1 << 10, 1 << 16, 1 << 20, 3 << 20)))
        return self._changed(info)

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[stage_pb2.Events]:
        yield stage_pb2.Events()
        while self.sent < MESSAGES:
            await asyncio.sleep(0.001)
            events = stage_pb2.Events()
            for _ in range(self.rng.choice((1, 1, 4))):
                timings = [stage_pb2.HopTiming(host="hostile", compute_ms=1.0, received_bytes=9)]
                session = self.rng.choice(self.sessions)
                events.events.add(session=session, number=0, text=b"x", timings=timings)
            yield self._changed(events)

    async def Push(self, batches: Any, context: Any) -> AsyncIterator[stage_pb2.Ack]:
        async for batch in batches:
            self.sessions.extend(hop.session for hop in batch.hops)
            ack = stage_pb2.Ack(number=batch.number)
            if self.rng.random() < 0.3:
                ack.rejections.add(index=0, code=5, message="no")
            yield self._changed(ack)

    async def Release(self, request: Any, context: Any) -> stage_pb2.ReleaseResponse:
        prefixes = stage_pb2.PrefixList(version=self.rng.getrandbits(60), digests=bytes(self.rng.choice((8, 1 << 20))))
        return self._changed(stage_pb2.ReleaseResponse(released=1, prefixes=prefixes))

    async def Warm(self, request: Any, context: Any) -> stage_pb2.WarmResponse:
        return self._changed(stage_pb2.WarmResponse(padding=bytes(request.reply_bytes)))


def test_other_requests_survive_ten_thousand_answers_of_a_hostile_host(
    bundles: Path, servers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, port = bundles / "own", free_port_block(5)
    honest = local_topology(3, 3, bundle, port + 1)
    address = f"127.0.0.1:{port + 4}"
    hostile = HostileHost(honest.hosts[1].address, seed=7)
    topology = Topology((*honest.hosts, HostEntry("hostile", address, (1,), address)), honest.router, bundle)
    of = Quarantine.of
    # else it would be heard once an hour
    monkeypatch.setattr(Quarantine, "of", lambda self, name: (of(self, name)[0], monotonic() + 0.05))

    async def serve(stop: asyncio.Event) -> None:
        server = new_server(4 << 20)
        stage_pb2_grpc.add_StageServiceServicer_to_server(hostile, server)
        server.add_insecure_port(address)
        async with started(server):
            await stop.wait()

    for entry in honest.hosts:
        after = [*honest.successors(entry), *([address] if entry.blocks == (0,) else [])]
        servers.stage(bundle, entry.blocks, entry.listen, after, name=entry.name)
    servers.router(topology, bundle)
    wait_ready(topology.router)
    with Client(topology.router) as client:
        right = client.generate(PROMPT, **ASK).output
        before = psutil.Process().memory_info().rss
        servers.run(serve)
        answers = []

        def enough() -> bool:
            answers.append(client.generate(PROMPT, **ASK).output)
            return hostile.sent >= MESSAGES

        with caplog.at_level(logging.CRITICAL):
            until(enough, 600.0)
        assert set(answers) == {right}
        assert client.status().ready
    assert "a job of the ring failed" not in caplog.text
    assert psutil.Process().memory_info().rss - before < MAX_BYTES
