"""The link to the next host: pushes work, and keeps the connection warm.

A small message every 150 ms keeps TCP's congestion window from falling back to its start while the link is idle;
gRPC's keepalive pings do not.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio

from stages.refusal import MARK, RETRY_AFTER, Refusal, trailing
from stages.transport import open_channel
from stages.v1 import stage_pb2, stage_pb2_grpc

KEEP_WARM_S = 0.15
WARM_TIMEOUT_S = 2.0


class Relay:
    """A warm connection to one stage server."""

    def __init__(self, address: str, message_bytes: int, hop_timeout_s: float, name: str = "") -> None:
        """:param hop_timeout_s: how long a push may wait for the next host's answer.
        :param name: what to call the host in errors; its own once it was described, if not given."""
        self.address, self.hop_timeout_s = address, hop_timeout_s
        self.name = name
        self.channel = open_channel(address, message_bytes)
        self.stub: stage_pb2_grpc.StageServiceAsyncStub = stage_pb2_grpc.StageServiceStub(self.channel)
        self.rtt_ms: float | None = None
        """Round trip of the last keep-warm message; None while the host does not answer."""

    async def push(self, request: stage_pb2.PushRequest) -> None:
        """Hand a hop over. Raises Refusal that names this address and how long it was waited for."""
        left, begin = request.deadline_unix_ms / 1000 - time.time(), time.perf_counter()
        try:
            await self.stub.Push(request, timeout=max(min(self.hop_timeout_s, left), 0.001), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if left < self.hop_timeout_s and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Refusal(error.code(), f"the deadline passed while {self.host} did not answer") from None
            raise self._refusal(error, begin) from None

    async def describe(self, timeout: float) -> stage_pb2.DescribeResponse:
        """What the next host holds. Raises Refusal."""
        begin = time.perf_counter()
        try:
            description = await self.stub.Describe(stage_pb2.DescribeRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error, begin) from None
        self.name = self.name or description.name
        return description

    async def warm(self, size: int) -> None:
        """Send one message of `size` bytes, so that the next one of that size finds the window open."""
        begin = time.perf_counter()
        try:
            await self.stub.Warm(stage_pb2.WarmRequest(padding=bytes(size)), timeout=WARM_TIMEOUT_S)
            self.rtt_ms = (time.perf_counter() - begin) * 1000
        except grpc.aio.AioRpcError as error:
            self.rtt_ms = None
            raise self._refusal(error, begin) from None

    async def keep_warm(self, size: int) -> None:
        """Warm the link for ever; after a break, with a message of `size` bytes."""
        while True:
            try:
                await self.warm(0 if self.rtt_ms is not None else size)
            except Refusal:
                await asyncio.sleep(KEEP_WARM_S)
            await asyncio.sleep(KEEP_WARM_S)

    async def close(self) -> None:
        await self.channel.close()

    @property
    def host(self) -> str:
        """What errors call the other side."""
        return f"host {self.name} at {self.address}" if self.name else f"the host at {self.address}"

    def _refusal(self, error: grpc.aio.AioRpcError, begin: float) -> Refusal:
        code, details, metadata = error.code(), error.details() or "", trailing(error)
        if MARK in metadata:
            retry_after = metadata.get(RETRY_AFTER)
            return Refusal(code, f"{self.host} refused: {details}", int(retry_after) if retry_after else None)
        if code is grpc.StatusCode.UNAVAILABLE:
            return Refusal(code, f"{self.host} cannot be reached ({details}); see that it runs")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            waited_s = time.perf_counter() - begin
            return Refusal(
                grpc.StatusCode.UNAVAILABLE,
                f"{self.host} did not answer within {waited_s:.1f} s; see that it runs and can be reached",
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Refusal(code, f"{self.address} is no stage server; the last host's successor is the first host")
        return Refusal(code, f"{self.host} failed: {details}")
