"""Who may call what on a stage server: decided from the caller's certificate, in this one place."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from stages.identity import HOST, ROUTER, Identity
from stages.refusal import Refusal
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

HOSTS_MAY = frozenset({"Describe", "Push", "Run", "Warm"})
"""What hosts need of each other; the rest is for routers."""


def identity_of(context: Context) -> Identity | None:
    """Who calls, by a certificate that the handshake has verified; None without one of onesweep."""
    return Identity.of(uri.decode() for uri in context.auth_context().get("peer_uri", ()))


def check_caller(peer: Identity | None, method: str, request: object) -> None:
    """Raise Refusal unless `peer` may call `method` of the stage service."""
    shown = peer.uri if peer else "of nobody that onesweep knows"
    if peer is None or peer.role not in (HOST, ROUTER):
        raise _denied(f"your certificate is {shown}: a stage server takes hosts and routers only")
    if peer.role == HOST and method not in HOSTS_MAY:
        raise _denied(f"your certificate is {shown}: {method} is for routers only")
    if isinstance(request, stage_pb2.SubscribeRequest) and request.router.rpartition(".")[0] != peer.name:
        raise _denied(f"your certificate is {shown}: you may listen as {peer.name}.SOMETHING only")


class Guard(grpc.aio.ServerInterceptor):
    """Turns callers of one service away before it sees them. Others of the same server, such as health, are open to
    everybody whose handshake came off."""

    def __init__(self, service: str) -> None:
        """:param service: its full name."""
        self.service = service
        self._said = ""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # a path that nobody serves may have any form
            return None
        _, service, method = str(handler_call_details.method).split("/")
        return self._guarded(handler, method) if service == self.service else handler

    def _guarded(self, handler: Handler, method: str) -> Handler:
        """The same handler behind the check."""

        async def answer(request: object, context: Context) -> object:
            await self._check(method, request, context)
            return await inner(request, context)

        async def stream(request: object, context: Context) -> AsyncIterator[object]:
            await self._check(method, request, context)
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response

        fields: Any = handler  # a named tuple, which the stubs do not say
        kind = next(kind for kind in KINDS if getattr(fields, kind) is not None)
        inner = getattr(fields, kind)
        guarded: Handler = fields._replace(**{kind: stream if fields.response_streaming else answer})
        return guarded

    async def _check(self, method: str, request: object, context: Context) -> None:
        try:
            check_caller(identity_of(context), method, request)
        except Refusal as refusal:
            if refusal.message != self._said:  # who is turned away often tries again at once
                log.warning("%s refused to %s: %s", method, context.peer(), refusal.message)
            self._said = refusal.message
            await refusal.abort(context)


def _denied(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.PERMISSION_DENIED, message)
