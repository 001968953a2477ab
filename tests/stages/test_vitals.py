"""The health port: what a probe may ask, and nothing else. With a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.errors import InputError, ServiceError
from stages.host import HostSettings
from stages.server import SERVICE, StageServer, StageSettings
from stages.v1 import stage_pb2, stage_pb2_grpc

Until = Callable[..., Any]


def test_probes_learn_of_life_and_readiness_only(bundles: Path, servers: Any, unused_port: int, until: Until) -> None:
    where = f"127.0.0.1:{unused_port}"
    host = HostSettings("whole")
    settings = StageSettings(bundles / "own", (0, 1, 2), "127.0.0.1:0", (), host, threads=1, health=where)
    running = servers.run(StageServer(settings).run)
    with grpc.insecure_channel(where) as channel:
        probe = health_pb2_grpc.HealthStub(channel)

        def status(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = probe.Check(request, wait_for_ready=True, timeout=20)
            return int(answer.status)

        assert status("") == health_pb2.HealthCheckResponse.SERVING
        until(lambda: status(SERVICE) == health_pb2.HealthCheckResponse.SERVING, 30)
        with pytest.raises(grpc.RpcError) as caught:
            stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    running.end()


@pytest.mark.parametrize(("where", "error"), [("here", InputError), ("192.0.2.1:7701", ServiceError)])
def test_an_address_that_cannot_be_listened_on(bundles: Path, where: str, error: type[Exception]) -> None:
    settings = StageSettings(bundles / "own", (0,), "127.0.0.1:0", (), HostSettings("host"), health=where)

    async def run() -> None:
        await StageServer(settings).run(asyncio.Event())

    with pytest.raises(error):
        asyncio.run(run())
