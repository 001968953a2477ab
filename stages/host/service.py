"""The gRPC face of a host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio

from onesweep.stages.checkpoint.release_store import BESIDE
from onesweep.stages.checkpoint.release_transfer import drain_requests, receive_release
from onesweep.stages.host.host import Host
from onesweep.stages.host.loading import Loader
from onesweep.stages.host.parts import full_state_bytes
from onesweep.stages.host.validation import check_label
from onesweep.stages.v1 import stage_pb2, stage_pb2_grpc
from onesweep.stages.wire.hop_stream import Relay
from onesweep.stages.wire.link_quality import MAX_PROBE_BYTES, kernel_now, measure_link
from onesweep.stages.wire.messages import PROTOCOL
from onesweep.stages.wire.status import StatusError, exhausted, invalid

Context = grpc.aio.ServicerContext[Any, Any]

MAX_RELEASED = 4096
VERSION = version("onesweep")  # read once: finding it takes longer than all else in an answer to Describe


class StageService(stage_pb2_grpc.StageServiceServicer):
    """Turns messages into calls of a Host, and Refusals into statuses."""

    def __init__(self, host: Host, loader: Loader) -> None:
        self.host, self.loader = host, loader
        self.not_ready_reason = "loading weights"
        self._probing, self._storing = asyncio.Lock(), asyncio.Lock()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        description = self.description()
        if request.HasField("prefixes"):
            description.prefixes.CopyFrom(self.host.prefixes.listing(request.prefixes))
        return description

    def description(self) -> stage_pb2.DescribeResponse:
        """The host as it is now."""
        reason = "it is stopping" if self.host.stopping else self.not_ready_reason
        return stage_pb2.DescribeResponse(
            name=self.host.settings.name,
            version=VERSION,
            blocks=self.host.blocks,
            ready=not reason,
            not_ready_reason=reason,
            links=[_link_info(relay) for relay in self.host.next_hosts.relays],
            counters=self.host.counters_now(),
            backend=self.loader.backend.kind,
            releases=[release.info() for release in self.host.releases.all],
            protocol=PROTOCOL,
        )

    async def Push(self, batches: AsyncIterator[stage_pb2.HopBatch], context: Context) -> AsyncIterator[stage_pb2.Ack]:
        async for batch in batches:
            yield self.host.take(batch)

    async def Run(self, request: stage_pb2.RunRequest, context: Context) -> stage_pb2.RunResponse:
        try:
            self.host.check_protocol(request.protocol)
            outcome = await self.host.run(request.hop)
        except StatusError as refusal:
            await refusal.abort(context)
        if isinstance(outcome, stage_pb2.Hop):
            return stage_pb2.RunResponse(next=outcome)
        return stage_pb2.RunResponse(event=outcome)

    async def Subscribe(self, request: stage_pb2.SubscribeRequest, context: Context) -> AsyncIterator[stage_pb2.Events]:
        try:
            check_label(request.router, "router")
        except StatusError as refusal:
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
        response = stage_pb2.ReleaseResponse(released=await self.host.end(list(request.sessions)))
        if request.HasField("prefixes"):
            response.prefixes.CopyFrom(self.host.prefixes.listing(request.prefixes))
        return response

    async def Warm(self, request: stage_pb2.WarmRequest, context: Context) -> stage_pb2.WarmResponse:
        if request.reply_bytes > MAX_PROBE_BYTES:
            await invalid(f"an answer has at most {MAX_PROBE_BYTES} bytes").abort(context)
        if request.padding:  # a request comes this way: its state shall find every window open
            self.host.next_hosts.wake()
        return stage_pb2.WarmResponse(padding=bytes(request.reply_bytes))

    async def Probe(self, request: stage_pb2.ProbeRequest, context: Context) -> stage_pb2.ProbeResponse:
        response = stage_pb2.ProbeResponse(kernel=kernel_now(), unix_us=time.time_ns() // 1000)
        if not 1 <= request.bytes <= MAX_PROBE_BYTES:
            await invalid(f"a probe sends 1 to {MAX_PROBE_BYTES} bytes").abort(context)
        if self._probing.locked():
            await exhausted("another probe is running", retry_after_ms=2000).abort(context)
        async with self._probing:
            for relay in self.host.next_hosts.relays:
                try:
                    quality = await measure_link(relay, full_state_bytes(self.host.releases.newest.plan), request.bytes)
                except grpc.aio.AioRpcError as error:
                    problem = f"{relay.host} does not answer ({error.details() or error.code().name})"
                    quality = stage_pb2.LinkQuality(address=relay.address, problem=problem)
                response.links.append(quality)
        return response

    async def Store(
        self, requests: AsyncIterator[stage_pb2.StoreRequest], context: Context
    ) -> AsyncIterator[stage_pb2.StoreResponse]:
        try:
            shelf = self.loader.require_shelf()
            if self._storing.locked():
                raise StatusError(grpc.StatusCode.ABORTED, "another release is being stored: try again when it is done")
            async with self._storing:
                async for response in receive_release(shelf, requests, self._needs):
                    yield response
        except StatusError as refusal:
            yield stage_pb2.StoreResponse(refused=True)
            await drain_requests(requests)
            await refusal.abort(context)

    def _needs(self, folder: str, part: int) -> bool:
        plan = self.host.releases.newest.plan
        if folder == "local":
            return False
        # The router net comes after the experts, and every host asks it. The last host needs the tokenizer where it
        # holds texts to a schema.
        beside = (folder == "experts" and part == plan.parts) or (folder == "ar" and part == BESIDE and plan.is_last)
        return part in self.host.blocks or beside

    async def Load(self, request: stage_pb2.LoadRequest, context: Context) -> stage_pb2.LoadResponse:
        try:
            await self.loader.load(request.release, set(request.keep))
        except StatusError as refusal:
            await refusal.abort(context)
        return stage_pb2.LoadResponse()

    async def Drop(self, request: stage_pb2.DropRequest, context: Context) -> stage_pb2.DropResponse:
        try:
            # a transfer that was cancelled may be about to put the release in its place
            async with self._storing:
                await self.loader.drop(request.release)
        except StatusError as refusal:
            await refusal.abort(context)
        return stage_pb2.DropResponse()


def _link_info(relay: Relay) -> stage_pb2.LinkInfo:
    return stage_pb2.LinkInfo(address=relay.address, rtt_ms=relay.least_rtt_ms or 0.0, problem=relay.problem)
