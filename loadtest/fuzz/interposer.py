"""A server in the middle: passes raw messages on to another one, and lets somebody see or change them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from stages.transport import new_server

MESSAGE_BYTES = 64 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]

Hook = Callable[[str, bytes], bytes]
"""Gets a method's name and a message; returns what goes on instead of it."""


def unchanged(method: str, data: bytes) -> bytes:
    return data


class Interposer:
    """Stands for one server of one service."""

    def __init__(self, service: ServiceDescriptor, listen: str, target: str) -> None:
        self.on_request: Hook = unchanged
        self.on_answer: Hook = unchanged
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._server = new_server(MESSAGE_BYTES)
        handlers = {method.name: self._handler(service.full_name, method) for method in service.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        self._server.add_insecure_port(listen)

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def _handler(self, service: str, method: MethodDescriptor) -> Any:  # noqa: ANN401
        path, name = f"/{service}/{method.name}", method.name

        async def requests(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for message in messages:
                yield self.on_request(name, message)

        async def unary(request: bytes, context: Any) -> bytes:  # noqa: ANN401
            call: Any = self._channel.unary_unary(path)
            try:
                answer = await call(self.on_request(name, request), timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await _passed_on(error, context)
            return self.on_answer(name, answer)

        async def answers(call: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
            try:
                async for answer in call:
                    yield self.on_answer(name, answer)
            except grpc.aio.AioRpcError as error:
                await _passed_on(error, context)
            finally:
                call.cancel()

        async def one_to_many(request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
            call: Any = self._channel.unary_stream(path)
            metadata = tuple(pair for pair in context.invocation_metadata() if pair[0] == "authorization")
            sent = call(self.on_request(name, request), timeout=context.time_remaining(), metadata=metadata)
            async for answer in answers(sent, context):
                yield answer

        async def many_to_many(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
            call: Any = self._channel.stream_stream(path)
            async for answer in answers(call(requests(messages)), context):
                yield answer

        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(many_to_many)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(one_to_many)
        return grpc.unary_unary_rpc_method_handler(unary)


async def _passed_on(error: grpc.aio.AioRpcError, context: Any) -> None:  # noqa: ANN401
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
