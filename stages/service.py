"""The gRPC face of a host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio

from stages.admission import check_label
from stages.host import Host
from stages.parts import ModelSource
from stages.refusal import Refusal, invalid
from stages.v1 import stage_pb2, stage_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_RELEASED = 4096


class StageService(stage_pb2_grpc.StageServiceServicer):
    """Turns messages into calls of a Host, and Refusals into statuses."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.not_ready_reason = "loading weights"

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        plan = self.host.plan
        return stage_pb2.DescribeResponse(
            name=self.host.settings.name,
            version=version("onesweep"),
            blocks=plan.blocks,
            chain=_model_info(plan.chain),
            ar=_model_info(plan.ar),
            ready=not self.not_ready_reason,
            not_ready_reason=self.not_ready_reason,
            next_address=self.host.relay.address if self.host.relay else "",
            counters=self.host.counters_now(),
        )

    async def Push(self, request: stage_pb2.PushRequest, context: Context) -> stage_pb2.PushResponse:
        try:
            self.host.accept(request, request.ByteSize())
        except Refusal as refusal:
            await refusal.abort(context)
        return stage_pb2.PushResponse()

    async def Subscribe(self, request: stage_pb2.SubscribeRequest, context: Context) -> AsyncIterator[stage_pb2.Event]:
        try:
            check_label(request.router, "router")
        except Refusal as refusal:
            await refusal.abort(context)
        try:
            async with aclosing(self.host.subscribers.listen(request.router)) as events:
                async for event in events:
                    yield event
        finally:
            if request.router not in self.host.subscribers:
                self.host.sessions.release_router(request.router)

    async def Release(self, request: stage_pb2.ReleaseRequest, context: Context) -> stage_pb2.ReleaseResponse:
        if len(request.sessions) > MAX_RELEASED:
            await invalid(f"at most {MAX_RELEASED} sessions can be released at once").abort(context)
        return stage_pb2.ReleaseResponse(released=self.host.release(list(request.sessions)))

    async def Warm(self, request: stage_pb2.WarmRequest, context: Context) -> stage_pb2.WarmResponse:
        return stage_pb2.WarmResponse()


def _model_info(source: ModelSource | None) -> stage_pb2.ModelInfo | None:
    if source is None:
        return None
    a = source.manifest.architecture
    return stage_pb2.ModelInfo(digest=source.digest, parts=a.parts, context_bytes=a.context_bytes, width=a.width)
