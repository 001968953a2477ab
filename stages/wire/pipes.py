"""Pipes: the bytes of one connection to a stage server, over a socket or a stream of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from stages.threads import cancelled
from stages.v1 import join_pb2
from stages.wire.status import Context, ignoring_ended_call

PIECE_BYTES = 64 << 10  # of a connection's bytes, in one message


class Pipe(Protocol):
    """One end. `write` waits while the other side does not read."""

    async def read(self) -> bytes:
        """The next bytes; none at the end."""

    async def write(self, data: bytes) -> None:
        """Hand bytes on."""

    async def end(self) -> None:
        """Nothing more is written."""


class SocketPipe:
    """A socket's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def read(self) -> bytes:
        return await self._reader.read(PIECE_BYTES)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def end(self) -> None:
        if self.writer.can_write_eof():
            self.writer.write_eof()


class CalledPipe:
    """The caller's end of `Carry`."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - a stream of gRPC, which the stubs do not export
        self._call = call

    async def read(self) -> bytes:
        chunk = await self._call.read()
        return b"" if chunk is grpc.aio.EOF else bytes(chunk.data)

    async def write(self, data: bytes) -> None:
        await self._call.write(join_pb2.Chunk(data=data))

    async def end(self) -> None:
        await self._call.done_writing()


class ServedPipe:
    """The server's end of `Carry`."""

    def __init__(self, requests: AsyncIterator[join_pb2.Chunk], context: Context) -> None:
        self._requests, self._context = requests, context

    async def read(self) -> bytes:
        chunk = await anext(self._requests, None)
        return b"" if chunk is None else bytes(chunk.data)

    async def write(self, data: bytes) -> None:
        with ignoring_ended_call():
            await self._context.write(join_pb2.Chunk(data=data))

    async def end(self) -> None:
        """A server's stream ends with its call."""


async def splice(first: Pipe, second: Pipe) -> None:
    """Carry bytes both ways until one side has ended.

    TLS says itself when a side is done, so a pipe that is half closed has nothing to say any more.
    """

    async def carry(source: Pipe, target: Pipe) -> None:
        with contextlib.suppress(OSError, grpc.RpcError, asyncio.IncompleteReadError):
            while data := await source.read():
                await target.write(data)
        with contextlib.suppress(OSError, grpc.RpcError, asyncio.InvalidStateError):
            await target.end()

    tasks = [asyncio.create_task(carry(first, second)), asyncio.create_task(carry(second, first))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(tasks)
