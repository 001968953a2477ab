"""The client: `Client` for plain code, `AsyncClient` for asyncio.

with Client() as client:
    result = client.generate("Once upon a time", mode="sweep", max_bytes=256, seed=1)
    print(result.text, result.latency_ms)
"""

from __future__ import annotations

import codecs
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypedDict, Unpack

import grpc
import grpc.aio

from serving.errors import RequestRefused, RouterError, error_of, is_unreachable
from serving.result import HostShare, Result, result_of
from serving.topology import DEFAULT_ROUTER
from serving.v1 import router_pb2, router_pb2_grpc
from stages.errors import InputError
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
MAX_BYTES = (1 << 32) - 1
MAX_SEED = (1 << 64) - 1
MAX_PROMPT_BYTES = 1 << 20
"""No model has a larger context."""


class RequestSettings(TypedDict, total=False):
    """Settings of a request; those that are None or left out are the router's to choose."""

    mode: str
    max_bytes: int
    seed: int
    temperature: float | None
    chunk: int | None
    steps: int | None
    codec: str | None
    sampler: str | None
    drafter: str | None
    draft: int | None
    scorer: str | None
    candidates: int | None
    suffix: str | bytes
    budget_ms: int | None


class TimedSettings(RequestSettings, total=False):
    """The same, with how long to wait for the whole answer."""

    timeout_s: float


class AsyncClient:
    """Talks to a router from asyncio code."""

    def __init__(
        self, address: str = DEFAULT_ROUTER, *, tls: Tls | None = None, token: str = "", insecure: bool = False
    ) -> None:
        """Like `Client`."""
        self.address, self._security = address, checked_security(address, tls, token, insecure)
        self._metadata = bearer(token)
        self._open()

    def _open(self) -> None:
        self._stamp = self._security.stamp()
        self._channel = open_channel(self.address, security=self._security)
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)

    def _who(self, authorization: str | None) -> tuple[tuple[str, str], ...]:
        """Metadata that says who asks. Raises InputError where a token would leave the machine in plain text."""
        if authorization is None:
            return self._metadata
        checked_security(self.address, self._security.tls, authorization, self._security.insecure)
        return (("authorization", authorization),)

    async def _failed(self, error: grpc.aio.AioRpcError, timeout_s: float) -> Exception:
        """What to raise; the next call shall see certificates that were renewed meanwhile."""
        if is_unreachable(error) and self._security.stamp() != self._stamp:
            await self._channel.close()
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
        **settings: Unpack[RequestSettings],
    ) -> AsyncGenerator[bytes | router_pb2.Trip | Result, None]:
        """Like `stream`, with a Trip for each sweep that came back.

        :param whole: the text in one piece at the end.
        :param authorization: sent to the router as metadata of this name, such as "Bearer TOKEN".
        """
        request = request_of(prompt, whole=whole, trips=trips, **settings)
        timeout_s = _checked_timeout(timeout_s)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._who(authorization))
        output = b""
        try:
            async for response in call:
                kind = response.WhichOneof("kind")
                if kind == "summary":
                    yield result_of(response.summary, output)
                elif kind == "trip":
                    yield response.trip
                else:
                    output += response.text
                    yield response.text
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error, timeout_s) from None
        finally:
            call.cancel()

    async def status(self, timeout_s: float = 5.0, authorization: str | None = None) -> router_pb2.StatusResponse:
        """The hosts as the router sees them. Raises RouterError."""
        metadata = self._who(authorization)
        try:
            return await self._stub.Status(router_pb2.StatusRequest(), timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error, timeout_s) from None

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
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error, timeout_s) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

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
        self._open()

    def _open(self) -> None:
        self._stamp = self._security.stamp()
        self._channel = open_blocking_channel(self.address, security=self._security)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def _failed(self, error: grpc.RpcError, timeout_s: float) -> Exception:
        """As in AsyncClient."""
        if is_unreachable(error) and self._security.stamp() != self._stamp:
            self._channel.close()
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
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request_of(
    prompt: str | bytes,
    *,
    mode: str = "sweep",
    max_bytes: int = 128,
    seed: int = 0,
    temperature: float | None = None,
    chunk: int | None = None,
    steps: int | None = None,
    codec: str | None = None,
    sampler: str | None = None,
    drafter: str | None = None,
    draft: int | None = None,
    scorer: str | None = None,
    candidates: int | None = None,
    suffix: str | bytes = b"",
    budget_ms: int | None = None,
    whole: bool = False,
    trips: bool = False,
) -> router_pb2.GenerateRequest:
    """A request message; None leaves a setting to the router. Raises InputError for what the message cannot carry."""
    raw, following = _raw("prompt", prompt), _raw("suffix", suffix)
    names = (("mode", mode), ("codec", codec), ("sampler", sampler), ("drafter", drafter), ("scorer", scorer))
    for word, text in names:
        if text is not None and not text.isascii():
            raise InputError(f"unknown {word} {text!r}: its name has letters that no {word} has")
    for name, value, least, most in (
        ("max_bytes", max_bytes, 1, MAX_BYTES),
        ("seed", seed, 0, MAX_SEED),
        ("chunk", chunk, 1, MAX_BYTES),
        ("steps", steps, 1, MAX_BYTES),
        ("draft", draft, 1, MAX_BYTES),
        ("candidates", candidates, 1, MAX_BYTES),
        ("budget_ms", budget_ms, 1, MAX_BYTES),
    ):
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            raise InputError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return router_pb2.GenerateRequest(
        prompt=raw,
        mode=mode,
        max_bytes=max_bytes,
        seed=seed,
        temperature=temperature,
        chunk=chunk,
        steps=steps,
        codec=codec,
        sampler=sampler,
        drafter=drafter,
        draft=draft,
        scorer=scorer,
        candidates=candidates,
        suffix=following,
        budget_ms=budget_ms,
        whole=whole,
        trips=trips,
    )


def _raw(name: str, text: str | bytes) -> bytes:
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise InputError(f"the {name} is not UTF-8: check the terminal's or file's encoding") from None
    if len(raw) > MAX_PROMPT_BYTES:
        raise InputError(f"the {name} has {len(raw)} bytes, at most {MAX_PROMPT_BYTES} can be sent: shorten it")
    return raw


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
    if token and tls is None and not is_loopback(address):
        raise InputError(f"a token is not sent to {address} in plain text: give --tls-ca")
    return security


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise InputError(f"timeout_s must be above 0, not {timeout_s}")
    return timeout_s
