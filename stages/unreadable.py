"""Messages that cannot be parsed: refused like any other bad one, by those who are asked and by those who asked.

gRPC itself answers a request that is no message with UNKNOWN and a traceback in the log, before any check of ours; and
hands whoever waits for an answer None instead of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from stages.refusal import invalid

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

Context = grpc.aio.ServicerContext[Any, Any]


class Unreadable:
    """Stands for a message."""


UNREADABLE = Unreadable()


class Screen(grpc.aio.ServerInterceptor):
    """Refuses requests that are no messages, with INVALID_ARGUMENT."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        screened = {"request_deserializer": _tolerant(handler.request_deserializer)}
        wrap = _screened_stream if handler.request_streaming else _screened
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            if (inner := getattr(handler, kind)) is not None:
                screened[kind] = wrap(inner, handler.response_streaming)
        return handler._replace(**screened)


def reading(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The same channel, whose calls fail with INTERNAL when an answer is no message."""
    wrapped: Any = _ReadingChannel(channel)
    return wrapped


class _ReadingChannel:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._channel, name)

    async def __aenter__(self) -> _ReadingChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    def unary_unary(self, *path: Any, **how: Any) -> Callable[..., _Reading]:  # noqa: ANN401
        return _reading(self._channel.unary_unary, path, how)

    def unary_stream(self, *path: Any, **how: Any) -> Callable[..., _Reading]:  # noqa: ANN401
        return _reading(self._channel.unary_stream, path, how)

    def stream_unary(self, *path: Any, **how: Any) -> Callable[..., _Reading]:  # noqa: ANN401
        return _reading(self._channel.stream_unary, path, how)

    def stream_stream(self, *path: Any, **how: Any) -> Callable[..., _Reading]:  # noqa: ANN401
        return _reading(self._channel.stream_stream, path, how)


class _Reading:
    """A call under way."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401
        self._call = call

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        answer = yield from self._call.__await__()
        return _readable(answer)

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for answer in self._call:
                yield _readable(answer)
        finally:
            self._call.cancel()


def _reading(make: Callable[..., Any], path: tuple[Any, ...], how: dict[str, Any]) -> Callable[..., _Reading]:
    if how.get("response_deserializer") is not None:
        how = how | {"response_deserializer": _tolerant(how["response_deserializer"])}
    begin = make(*path, **how)
    return lambda *request, **options: _Reading(begin(*request, **options))


def _readable(answer: object) -> object:
    """Raises AioRpcError."""
    if answer is UNREADABLE:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, nothing, nothing, "the answer is no message of this call's type"
        )
    return answer


def _tolerant(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def parsed(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError:
            return UNREADABLE

    return parsed


def _screened(inner: Callable[..., Any], streaming: bool) -> Callable[..., Any]:
    async def answer(request: object, context: Context) -> object:
        if request is UNREADABLE:
            await _refuse(context)
        return await inner(request, context)

    async def stream(request: object, context: Context) -> AsyncIterator[object]:
        if request is UNREADABLE:
            await _refuse(context)
        responses = inner(request, context)
        if not hasattr(responses, "__aiter__"):  # it writes its answers itself
            await responses
            return
        async with aclosing(responses):
            async for response in responses:
                yield response

    return stream if streaming else answer


def _screened_stream(inner: Callable[..., Any], streaming: bool) -> Callable[..., Any]:
    async def readable(requests: AsyncIterator[object], context: Context) -> AsyncIterator[object]:
        async for request in requests:
            if request is UNREADABLE:
                await _refuse(context)
            yield request

    async def answer(requests: AsyncIterator[object], context: Context) -> object:
        return await inner(readable(requests, context), context)

    async def stream(requests: AsyncIterator[object], context: Context) -> AsyncIterator[object]:
        async with aclosing(inner(readable(requests, context), context)) as responses:
            async for response in responses:
                yield response

    return stream if streaming else answer


async def _refuse(context: Context) -> None:
    await invalid("the request is no message of this call's type: it was damaged, or is of another program").abort(
        context
    )
