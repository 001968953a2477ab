"""The client: `Client` for plain code, `AsyncClient` for asyncio.

with Client() as client:
    result = client.generate("Once upon a time", mode="sweep", max_bytes=256, seed=1)
    print(result.text, result.latency_ms)
"""

from __future__ import annotations

import asyncio
import codecs
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.errors import RequestRefused, RouterError, error_of, is_unreachable
from serving.request import RequestSettings, TimedSettings, request_of
from serving.result import HostShare, Result, result_of
from serving.topology import DEFAULT_ROUTER
from serving.v1 import router_pb2, router_pb2_grpc
from stages.errors import InputError
from stages.refusal import REQUEST
from stages.security import Security, Tls
from stages.tokens import bearer
from stages.transport import check_target, is_loopback, open_blocking_channel, open_channel

__all__ = [
    "AsyncClient",
    "Client",
    "HostShare",
    "RequestRefused",
    "RequestSettings",
    "Result",
    "RouterError",
    "TextDecoder",
    "TimedSettings",
    "Tls",
    "request_of",
]

DEFAULT_TIMEOUT_S = 120.0
SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


class AsyncClient:
    """Talks to a router from asyncio code."""

    def __init__(
        self, address: str = DEFAULT_ROUTER, *, tls: Tls | None = None, token: str = "", insecure: bool = False
    ) -> None:
        """Like `Client`."""
        self.address, self._security = address, checked_security(address, tls, token, insecure)
        self._metadata = bearer(token)
        self._channels: list[grpc.aio.Channel] = []
        """The last is used; calls of others go on over those before it."""
        self._open()

    @property
    def is_private(self) -> bool:
        """Whether nobody on the way could read a token."""
        return _is_private(self.address, self._security.tls)

    def _open(self) -> None:
        stamp = self._security.stamp()
        self._channels.append(open_channel(self.address, security=self._security))
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channels[-1])
        self._stamp = stamp

    def _who(self, authorization: str | None) -> tuple[tuple[str, str], ...]:
        """Metadata that says who asks. Raises InputError where a token would leave the machine in plain text."""
        if authorization is None:
            return self._metadata
        checked_security(self.address, self._security.tls, authorization, self._security.insecure)
        return (("authorization", authorization),)

    def _failed(self, error: grpc.aio.AioRpcError | asyncio.CancelledError, timeout_s: float) -> BaseException:
        """What to raise; the next call shall see certificates that were renewed meanwhile."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return error
            # gRPC raises it, too, where it was the connection that ended
            return RouterError(f"the connection to {self.address} was closed", grpc.StatusCode.UNAVAILABLE)
        if is_unreachable(error) and self._security.stamp() != self._stamp:
            with suppress(InputError):  # half of it may be replaced yet
                self._open()
        return error_of(error, self.address, timeout_s, self._security)

    async def generate(self, prompt: str | bytes, **settings: Unpack[TimedSettings]) -> Result:
        """Generate a whole text; see `request_of` for the settings. Raises RequestRefused or RouterError."""
        result: Result | None = None
        async for item in self.events(prompt, whole=True, **settings):
            if isinstance(item, Result):
                result = item
        if result is None:
            raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
        return result

    async def stream(
        self, prompt: str | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S, **settings: Unpack[RequestSettings]
    ) -> AsyncIterator[bytes | Result]:
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        async with aclosing(self.events(prompt, timeout_s=timeout_s, **settings)) as events:
            async for event in events:
                if not isinstance(event, router_pb2.Trip):
                    yield event

    async def events(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        trips: bool = False,
        authorization: str | None = None,
        named: Callable[[str], object] | None = None,
        **settings: Unpack[RequestSettings],
    ) -> AsyncGenerator[bytes | router_pb2.Trip | Result, None]:
        """Like `stream`, with a Trip for each sweep that came back.

        :param whole: the text in one piece at the end.
        :param authorization: sent to the router as metadata of this name, such as "Bearer TOKEN".
        :param named: hears first what the router calls the request, where it says so.
        """
        request = request_of(prompt, whole=whole, trips=trips, **settings)
        timeout_s = _checked_timeout(timeout_s)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._who(authorization))
        output = b""
        try:
            if named is not None and (name := dict(await call.initial_metadata()).get(REQUEST)):
                named(str(name))
            async for response in call:
                kind = response.WhichOneof("kind")
                if kind == "summary":
                    yield result_of(response.summary, output)
                elif kind == "trip":
                    yield response.trip
                else:
                    output += response.text
                    yield response.text
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._failed(error, timeout_s) from None
        finally:
            call.cancel()

    async def status(self, timeout_s: float = 5.0, authorization: str | None = None) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        metadata = self._who(authorization)
        try:
            return await self._stub.Status(router_pb2.StatusRequest(), timeout=timeout_s, metadata=metadata)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._failed(error, timeout_s) from None

    async def serves(self, timeout_s: float = 5.0) -> bool:
        """Whether the router can take requests, which it tells everybody. Raises RouterError."""
        health = health_pb2_grpc.HealthStub(self._channels[-1])
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._failed(error, timeout_s) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def exchange(
        self, requests: AsyncIterator[router_pb2.DeployRequest] | None, timeout_s: float
    ) -> AsyncGenerator[router_pb2.DeployProgress, None]:
        """What the router tells while it exchanges its weights for those that `requests` bring (serving/deploying.py).

        :param requests: None = it goes back to the release before. Raises RequestRefused or RouterError.
        """
        call: (
            grpc.aio.UnaryStreamCall[router_pb2.RollbackRequest, router_pb2.DeployProgress]
            | grpc.aio.StreamStreamCall[router_pb2.DeployRequest, router_pb2.DeployProgress]
        )
        if requests is None:
            call = self._stub.Rollback(router_pb2.RollbackRequest(), timeout=timeout_s, metadata=self._metadata)
        else:
            call = self._stub.Deploy(requests, timeout=timeout_s, metadata=self._metadata)
        try:
            async for progress in call:
                yield progress
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._failed(error, timeout_s) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Client:
    """Talks to a router from plain code."""

    def __init__(
        self, address: str = DEFAULT_ROUTER, *, tls: Tls | None = None, token: str = "", insecure: bool = False
    ) -> None:
        """:param tls: whose certificate of the router is believed; None = plain text.
        :param token: who asks, where the router wants to know.
        :param insecure: accept plain text to another machine, without a token.

        Raises InputError for what must not be sent so.
        """
        self.address, self._security = address, checked_security(address, tls, token, insecure)
        self._metadata = bearer(token)
        self._channels: list[grpc.Channel] = []
        self._open()

    def _open(self) -> None:
        stamp = self._security.stamp()
        self._channels.append(open_blocking_channel(self.address, security=self._security))
        self._stub = router_pb2_grpc.RouterServiceStub(self._channels[-1])
        self._stamp = stamp

    def _failed(self, error: grpc.RpcError, timeout_s: float) -> Exception:
        """As in AsyncClient."""
        if is_unreachable(error) and self._security.stamp() != self._stamp:
            with suppress(InputError):
                self._open()
        return error_of(error, self.address, timeout_s, self._security)

    def generate(self, prompt: str | bytes, **settings: Unpack[TimedSettings]) -> Result:
        """Generate a whole text; see `request_of` for the settings. Raises RequestRefused or RouterError."""
        result: Result | None = None
        for item in self._items(prompt, whole=True, **settings):
            if isinstance(item, Result):
                result = item
        if result is None:
            raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
        return result

    def stream(
        self, prompt: str | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S, **settings: Unpack[RequestSettings]
    ) -> Iterator[bytes | Result]:
        """Pieces of text as they arrive, then the Result. Leaving early cancels the request on every host."""
        yield from self._items(prompt, timeout_s=timeout_s, **settings)

    def _items(
        self,
        prompt: str | bytes,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        whole: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Iterator[bytes | Result]:
        request = request_of(prompt, whole=whole, **settings)
        call = self._stub.Generate(request, timeout=_checked_timeout(timeout_s), metadata=self._metadata)
        output = b""
        try:
            for response in call:
                if response.WhichOneof("kind") == "summary":
                    yield result_of(response.summary, output)
                else:
                    output += response.text
                    yield response.text
        except grpc.RpcError as error:
            raise self._failed(error, timeout_s) from None
        finally:
            call.cancel()

    def status(self, timeout_s: float = 5.0) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        try:
            return self._stub.Status(router_pb2.StatusRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failed(error, timeout_s) from None

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TextDecoder:
    """Shows bytes as they arrive without cutting a UTF-8 character in two."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


def checked_security(address: str, tls: Tls | None, token: str, insecure: bool) -> Security:
    """How to dial a router. Raises InputError; a token never leaves the machine in plain text, whoever accepts it."""
    security = Security(tls, insecure)
    check_target(address, security, "router address")
    if token and not _is_private(address, tls):
        raise InputError(f"a token is not sent to {address} in plain text: give --tls-ca")
    return security


def _is_private(address: str, tls: Tls | None) -> bool:
    return tls is not None or is_loopback(address)


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise InputError(f"timeout_s must be above 0, not {timeout_s}")
    return timeout_s
