"""The gRPC face of the router."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc.aio

from serving.accounting import Account
from serving.admission import check_fit, check_mode, check_request
from serving.conditions import Conditions
from serving.modes import Mode
from serving.quota import Admission
from serving.ring import Ring
from serving.tokens import GENERATE, STATUS, Keyring
from serving.v1 import router_pb2, router_pb2_grpc
from stages.refusal import Refusal

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
        keyring: Keyring,
        admission: Admission,
        ring_wait_s: float,
    ) -> None:
        """:param conditions: learns from every request.
        :param keyring: who may ask.
        :param admission: how much of it at once.
        :param ring_wait_s: how long a request waits for hosts that are not ready."""
        self.ring, self.modes, self.conditions = ring, modes, conditions
        self.keyring, self.admission, self.ring_wait_s = keyring, admission, ring_wait_s

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        try:
            key, deadline_unix_ms = self.keyring.identify(context.invocation_metadata(), GENERATE), _deadline(context)
            async with (
                self.admission.enter(key, request.max_bytes) as ticket,
                aclosing(self._generate(request, deadline_unix_ms)) as responses,
            ):
                async for response in responses:
                    ticket.spend(len(response.text))
                    yield response
        except Refusal as refusal:
            await refusal.abort(context)

    async def Status(self, request: router_pb2.StatusRequest, context: Context) -> router_pb2.StatusResponse:
        try:
            self.keyring.identify(context.invocation_metadata(), STATUS)
        except Refusal as refusal:
            await refusal.abort(context)
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
            requests=self.admission.requests,
            request_limit=self.admission.settings.request_limit,
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
