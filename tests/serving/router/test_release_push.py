"""A release is brought to a host, whole, and a deployment learns of one that was removed from the ring."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest

from serving.router.host_link import HostLink
from serving.router.rollout import drop, load, send
from serving.router.topology import HostEntry
from stages.checkpoint.release_store import read_release_manifest
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.messages import PROTOCOL
from tests.conftest import refused, started

TAKEN_OUT = "host paris at .* was removed from the ring meanwhile: deploy again"


class Silent(stage_pb2_grpc.StageServiceServicer):
    """Takes every call, and answers none."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Load(self, request: Any, context: Any) -> Any:
        self.called.set()
        await asyncio.Event().wait()

    async def Store(self, requests: Any, context: Any) -> Any:
        self.called.set()
        await asyncio.Event().wait()

    Drop = Load


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[HostLink, Silent]]:
    server, service = grpc.aio.server(), Silent()
    stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
    where = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    async with started(server):
        yield HostLink(HostEntry("paris", where, (0,), where), 1.0), service


@pytest.mark.parametrize("what", ["load", "send", "drop"])
async def test_a_host_removed_during_a_call_is_named(what: str, bundles: Path) -> None:
    contents = read_release_manifest(bundles / "own")

    def call(link: HostLink) -> Any:
        return send(link, contents) if what == "send" else {"load": load, "drop": drop}[what](link, contents.name)

    async with linked() as (link, service):
        under_way = asyncio.create_task(call(link))
        await service.called.wait()
        await link.relay.close()
        for each in (under_way, call(link)):
            with refused(grpc.StatusCode.UNAVAILABLE, TAKEN_OUT):
                await each


async def test_a_dropped_release_is_no_longer_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Silent, "Drop", AsyncMock(return_value=stage_pb2.DropResponse()))
    monkeypatch.setattr(Silent, "Describe", AsyncMock(return_value=stage_pb2.DescribeResponse(protocol=PROTOCOL)))
    async with linked() as (link, _):
        link.held = {("digest",): stage_pb2.Release(name="tried")}
        await drop(link, "tried")
        assert link.held == {}
        await link.relay.close()


async def test_an_abandoned_deployment_is_cancelled() -> None:
    async with linked() as (link, service):
        under_way = asyncio.create_task(load(link, "name"))
        await service.called.wait()
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        await link.relay.close()
