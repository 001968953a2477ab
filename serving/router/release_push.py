"""Bringing a release to one host: its files onto the host's shelf, its weights into the host's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio

from serving.router.paths import HostLink
from stages.checkpoint.release_store import ReleaseManifest
from stages.checkpoint.release_transfer import ReleaseTransfer, transfer_error
from stages.v1 import stage_pb2
from stages.wire.status import StatusError

STORE_S = 3600.0
LOAD_S = 600.0
DROP_S = LOAD_S  # A host that is loading lets go of a release when it is done
# How a host refuses a release whose files it lacks, or has damaged ones of.
NOT_WHOLE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)


async def store(link: HostLink, contents: ReleaseManifest) -> int:
    """Put a release onto a host's shelf; returns the bytes that it did not have. Raises Refusal.

    :param contents: with its directories.
    """
    sent: list[int] = []
    delivery = ReleaseTransfer(contents, lambda _, size: sent.append(size))
    try:
        with _refusals(link):
            async for response in link.relay.stub.Store(delivery.requests(), timeout=STORE_S):
                if response.stored:
                    return sum(sent)
                delivery.hear(response)
    except StatusError:
        if delivery.failure:
            raise transfer_error(delivery.failure) from None
        raise
    finally:
        delivery.close()
    raise StatusError(grpc.StatusCode.INTERNAL, f"{link.relay.host} did not say that the release is stored")


async def load(link: HostLink, name: str, keep: Sequence[str] = ()) -> None:
    """Have a host load a release from its shelf, and look at what it holds then. Raises Refusal."""
    with _refusals(link):
        await link.relay.stub.Load(stage_pb2.LoadRequest(release=name, keep=keep), timeout=LOAD_S)
        await link.describe()


async def bring(link: HostLink, name: str, contents: ReleaseManifest | None, keep: Sequence[str] = ()) -> None:
    """Have a host load a release, whose files it may lack, or have damaged. Raises Refusal.

    :param contents: None where there are no files to send.
    """
    try:
        await load(link, name, keep)
    except StatusError as refusal:
        if refusal.code not in NOT_WHOLE or contents is None:
            raise
        await store(link, contents)
        await load(link, name, keep)


async def drop(link: HostLink, name: str) -> None:
    """Have a host let go of a release. Raises Refusal."""
    with _refusals(link):
        await link.relay.stub.Drop(stage_pb2.DropRequest(release=name), timeout=DROP_S)


@contextmanager
def _refusals(link: HostLink) -> Iterator[None]:
    """Errors of gRPC as StatusErrors."""
    begin = time.perf_counter()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise link.relay.refusal(error, begin) from None
    except grpc.aio.UsageError:
        raise _taken_out(link) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _taken_out(link) from None


def _taken_out(link: HostLink) -> StatusError:
    """The channel was closed before a call, or under it, which gRPC calls a cancellation."""
    message = f"{link.relay.host} was taken out of the ring meanwhile: deploy again"
    return StatusError(grpc.StatusCode.UNAVAILABLE, message)
