"""A host without a network, whose router is the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from stages.host.host import Host
from stages.host.next_hosts import NextHosts
from stages.host.parts import Parts, Release
from stages.host.settings import HostSettings
from stages.v1 import stage_pb2
from stages.wire.messages import PROTOCOL
from tests.conftest import PATIENCE_S
from tests.stages.raw_client import ROUTER

KEY = b"k" * 32  # the key of the router's vouchers


@asynccontextmanager
async def open_host(parts: Parts, working: bool = True, **settings: Any) -> AsyncIterator[Host]:
    """A host that the test listens to, and whose worker runs, or not yet."""
    links = NextHosts(lambda address, other: "", 0, 1 << 20, 1.0, 0.0)
    host = Host(Release("r", parts.plan, parts), HostSettings("h", **settings), links)
    async with listening(host, working):
        yield host


@asynccontextmanager
async def listening(host: Host, working: bool = True) -> AsyncIterator[None]:
    events = host.subscribers.listen(ROUTER, KEY)
    await anext(events)
    worker = asyncio.create_task(host.work()) if working else None
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        if worker is not None:
            worker.cancel()
        host.close()


def send(host: Host, *hops: stage_pb2.Hop) -> None:
    assert not host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=hops)).rejections


async def event_of(host: Host) -> stage_pb2.Event:
    return await host.subscribers.queues[ROUTER].get()
