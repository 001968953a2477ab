"""The gRPC face of the router."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc.aio
from asyncio_throttle.throttler import Throttler

from serving.accounting import Account
from serving.admission import check_fit, check_mode, check_request
from serving.conditions import Conditions
from serving.modes import Mode
from serving.ring import Ring
from serving.v1 import router_pb2, router_pb2_grpc
from stages.refusal import Refusal, exhausted

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 3600.0


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Admits requests, runs their mode, streams their text and closes their account."""

    def __init__(
        self,
        ring: Ring,
        modes: dict[str, Mode],
        conditions: Conditions,
        request_limit: int,
        requests_per_s: int,
        ring_wait_s: float,
    ) -> None:
        """:param conditions: learns from every request.
        :param request_limit: requests in flight; one more is refused.
        :param requests_per_s: pace at which admitted requests start.
        :param ring_wait_s: how long a request waits for hosts that are not ready."""
        self.ring, self.modes, self.conditions = ring, modes, conditions
        self.request_limit, self.ring_wait_s = request_limit, ring_wait_s
        self.throttler = Throttler(rate_limit=requests_per_s, period=1.0)
        self.requests = 0

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        try:
            if self.requests >= self.request_limit:
                raise exhausted(f"{self.requests} requests are under way, the limit", retry_after_ms=1000)
            self.requests += 1
            try:
                async with self.throttler, aclosing(self._generate(request, _deadline(context))) as responses:
                    async for response in responses:
                        yield response
            finally:
                self.requests -= 1
        except Refusal as refusal:
            await refusal.abort(context)

    async def Status(self, request: router_pb2.StatusRequest, context: Context) -> router_pb2.StatusResponse:
        return router_pb2.StatusResponse(
            version=version("onesweep"),
            ready=not self.ring.problem,
            hosts=[
                router_pb2.HostStatus(
                    name=link.entry.name,
                    address=link.entry.address,
                    blocks=link.entry.blocks,
                    ready=not link.problem,
                    reason=link.problem,
                    rtt_ms=link.relay.rtt_ms or 0.0,
                    sessions=link.info.counters.sessions if link.info else 0,
                    session_bytes=link.info.counters.session_bytes if link.info else 0,
                )
                for link in self.ring.links
            ],
            modes=[name for name, mode in self.modes.items() if not mode.problem],
            chain_digest=self.ring.digest("chain"),
            ar_digest=self.ring.digest("ar"),
            context_bytes=max((mode.context_bytes for mode in self.modes.values() if not mode.problem), default=0),
            requests=self.requests,
            request_limit=self.request_limit,
            scorer_digest=self.ring.digest("scorer"),
        )

    async def _generate(
        self, request: router_pb2.GenerateRequest, deadline_unix_ms: int
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        mode = check_mode(request.mode, self.modes)
        generation = check_request(request, mode, deadline_unix_ms)
        if mode.uses_hosts:
            await self.ring.usable(self.ring_wait_s)
        check_fit(generation, mode)
        account = Account()
        async with aclosing(mode.generate(generation, account)) as pieces:
            whole = b""
            async for text in pieces:
                for trip in account.take_trips():
                    if request.trips:
                        yield router_pb2.GenerateResponse(trip=trip)
                if request.whole:
                    whole += text
                else:
                    yield router_pb2.GenerateResponse(text=text)
            if whole:
                yield router_pb2.GenerateResponse(text=whole)
        hosts = {link.info.name: link.entry for link in self.ring.links if link.info}
        self.conditions.learn(mode.name, account, account.elapsed_ms())
        summary = account.summary(mode.name, request.seed, len(request.prompt), hosts)
        yield router_pb2.GenerateResponse(summary=summary)


def _deadline(context: Context) -> int:
    """Absolute deadline of a call, Unix milliseconds; calls without one get the default."""
    left = context.time_remaining()
    return int((time.time() + min(DEFAULT_TIMEOUT_S if left is None else left, MAX_TIMEOUT_S)) * 1000)
