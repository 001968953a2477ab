"""How a stage server ends: after the requests that it has, and not without a word when something fails."""

from pathlib import Path
from typing import Any

import pytest

from serving.cli.ports import free_port_block
from stages.host.host import HostSettings
from stages.host.server import StageServer
from stages.host.settings import StageSettings
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel
from stages.wire.etcd import EtcdClient
from stages.wire.flags import open_registry
from stages.wire.messages import PROTOCOL
from stages.wire.registry import RegistrySettings, parse_url
from tests.conftest import PATIENCE_S, until

pytestmark = pytest.mark.slow


def test_it_stays_registered_until_its_requests_have_ended(bundles: Path, registry_url: str, servers: Any) -> None:
    where = RegistrySettings(*parse_url(registry_url))
    gateway = EtcdClient(where)
    address, own, host = f"127.0.0.1:{free_port_block(1)}", open_registry(where), HostSettings("paris")
    settings = StageSettings(bundles / "own", (0, 1, 2), address, (), host, threads=1, registry=own)
    running = servers.run(StageServer(settings).run)
    with open_blocking_channel(address) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)

        def described() -> stage_pb2.DescribeResponse:
            return stub.Describe(stage_pb2.DescribeRequest(), timeout=PATIENCE_S, wait_for_ready=True)

        until(lambda: described().ready and gateway.snapshot())
        events = stub.Subscribe(stage_pb2.SubscribeRequest(router="r"))
        next(events)
        hop = stage_pb2.Hop(router="r", session="s", capacity=40, digest=described().releases[0].chain.digest)
        hop.left_s = 60
        hop.sweep.CopyFrom(stage_pb2.Sweep(clean=b"The sea ", slots=16, steps=2, codec="int8"))
        assert not next(stub.Push(iter([stage_pb2.HopBatch(number=1, hops=[hop], protocol=PROTOCOL)]))).rejections
        assert next(events).events[0].text
        running.loop.call_soon_threadsafe(running.stop.set)
        until(lambda: described().not_ready_reason == "it is stopping")
        assert not described().ready
        assert gateway.snapshot()
        stub.Release(stage_pb2.ReleaseRequest(sessions=["s"]), timeout=PATIENCE_S)
        running.ended.result(PATIENCE_S)
    assert not gateway.snapshot()
