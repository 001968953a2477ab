"""Bringing a release to one host: its files onto the host's shelf, its weights into the host's memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc
import grpc.aio

from serving.link import HostLink
from stages.contents import Contents
from stages.delivery import Delivery, refused
from stages.refusal import Refusal
from stages.v1 import stage_pb2

STORE_S = 3600.0
LOAD_S = 600.0
DROP_S = 30.0
NOT_WHOLE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
"""How a host refuses a release whose files it lacks, or has damaged ones of."""


async def store(link: HostLink, contents: Contents) -> int:
    """Put a release onto a host's shelf; returns the bytes that it did not have. Raises Refusal.

    :param contents: with its directories.
    """
    sent: list[int] = []
    delivery, begin = Delivery(contents, lambda _, size: sent.append(size)), time.perf_counter()
    try:
        async for response in link.relay.stub.Store(delivery.requests(), timeout=STORE_S):
            if response.stored:
                return sum(sent)
            delivery.hear(response)
    except grpc.aio.AioRpcError as error:
        if delivery.failure:
            raise refused(delivery.failure) from None
        raise link.relay.refusal(error, begin) from None
    finally:
        delivery.close()
    raise Refusal(grpc.StatusCode.INTERNAL, f"{link.relay.host} did not say that the release is stored")


async def load(link: HostLink, name: str, keep: Sequence[str] = ()) -> None:
    """Have a host load a release from its shelf, and look at what it holds then. Raises Refusal."""
    begin = time.perf_counter()
    try:
        await link.relay.stub.Load(stage_pb2.LoadRequest(release=name, keep=keep), timeout=LOAD_S)
    except grpc.aio.AioRpcError as error:
        raise link.relay.refusal(error, begin) from None
    await link.describe()


async def bring(link: HostLink, name: str, contents: Contents | None, keep: Sequence[str] = ()) -> None:
    """Have a host load a release, whose files it may lack, or have damaged. Raises Refusal.

    :param contents: None where there are no files to send.
    """
    try:
        await load(link, name, keep)
    except Refusal as refusal:
        if refusal.code not in NOT_WHOLE or contents is None:
            raise
        await store(link, contents)
        await load(link, name, keep)


async def drop(link: HostLink, name: str) -> None:
    """Have a host let go of a release. Raises Refusal."""
    begin = time.perf_counter()
    try:
        await link.relay.stub.Drop(stage_pb2.DropRequest(release=name), timeout=DROP_S)
    except grpc.aio.AioRpcError as error:
        raise link.relay.refusal(error, begin) from None
