"""How a stage server ends: after the requests that it has."""

from pathlib import Path
from typing import Any

from serving.cli.ports import free_port_block
from stages.v1 import stage_pb2
from stages.wire.messages import PROTOCOL
from tests.conftest import PATIENCE_S, until
from tests.stages.raw_client import peer


def test_it_lives_until_its_requests_have_ended(bundles: Path, servers: Any) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    running = servers.stage(bundles / "own", (0, 1, 2), address)
    with peer(address) as host:
        until(lambda: host.describe().ready)
        events = host.stub.Subscribe(stage_pb2.SubscribeRequest(router="r"))
        next(events)
        hop = stage_pb2.Hop(router="r", session="s", capacity=40, digest=host.describe().releases[0].chain.digest)
        hop.left_s = 60
        hop.sweep.CopyFrom(stage_pb2.Sweep(clean=b"The sea ", slots=16, steps=2, codec="int8"))
        batch = stage_pb2.HopBatch(number=1, hops=[hop], protocol=PROTOCOL)
        assert not next(host.stub.Push(iter([batch]))).rejections
        assert next(events).events[0].text
        running.loop.call_soon_threadsafe(running.stop.set)
        until(lambda: host.describe().not_ready_reason == "it is stopping")
        assert not running.ended.done()
        host.stub.Release(stage_pb2.ReleaseRequest(sessions=["s"]), timeout=PATIENCE_S)
        running.ended.result(PATIENCE_S)
