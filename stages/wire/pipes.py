"""Pipes: the bytes of one connection to a stage server, over a socket or a gRPC stream."""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from stages.threads import cancelled
from stages.v1 import join_pb2, join_pb2_grpc
from stages.wire.status import Context, exhausted, ignoring_ended_call, not_found

log = logging.getLogger(__name__)

PIPE_KEY = "onesweep-pipe"  # metadata of Carry: identifies the pipe
PIPE_NOT_AWAITED = "no one is waiting for this pipe"
PIECE_BYTES = 64 << 10  # of a connection's bytes in one message
# Memory of a pipe in a relay if its readers do not read: for each end, the data that gRPC buffered (its window, which
# grew to 4 MB where it measured the link), a piece being forwarded, and a piece that gRPC writes. A window of 1 MB
# fills 60 ms at 100 Mbit/s.
WINDOW_BYTES = 1 << 20
PIPE_BYTES = 2 * (WINDOW_BYTES + 2 * PIECE_BYTES)
WINDOW_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
PAIR_BYTES, RELAY_BYTES = 32 * PIPE_BYTES, 256 * PIPE_BYTES  # between two machines, and in total


class Pipe(Protocol):
    """One end of a pipe. `write` waits while the other side does not read."""

    async def read(self) -> bytes:
        """The next bytes; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Send bytes."""

    async def end(self) -> None:
        """End this side's writing."""


class SocketPipe:
    """A socket's end of a pipe."""

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
    """The caller's end of a pipe over `Carry`."""

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
    """The server's end of a pipe over `Carry`."""

    def __init__(self, requests: AsyncIterator[join_pb2.Chunk], context: Context) -> None:
        self._requests, self._context = requests, context

    async def read(self) -> bytes:
        chunk = await anext(self._requests, None)
        return b"" if chunk is None else bytes(chunk.data)

    async def write(self, data: bytes) -> None:
        with ignoring_ended_call():
            await self._context.write(join_pb2.Chunk(data=data))

    async def end(self) -> None:
        """Does nothing: a server's stream ends with its call."""


class AwaitedPipes(join_pb2_grpc.JoinServiceServicer):  # its other methods are UNIMPLEMENTED
    """Pipes that others were asked to open to this process, and a stage server's `Carry`, which accepts them.

    Only the rendezvous has the rest of the service."""

    def __init__(self) -> None:
        self._awaited = dict[str, tuple[str, asyncio.Future[Pipe], asyncio.Event]]()

    @contextlib.asynccontextmanager
    async def awaited(self, opener: str = "") -> AsyncIterator[tuple[str, asyncio.Future[Pipe]]]:
        """A new pipe, and its other end once opened. :param opener: the only one who may open it; empty: any caller."""
        pipe, done = secrets.token_hex(16), asyncio.Event()
        found: asyncio.Future[Pipe] = asyncio.get_running_loop().create_future()
        self._awaited[pipe] = opener, found, done
        try:
            yield pipe, found
        finally:
            del self._awaited[pipe]
            done.set()

    async def open(self, metadata: Mapping[str, object], opener: str, own: Pipe) -> bool:
        """Give an end of the pipe to its waiter until the waiter is done; False if there is no waiter."""
        who, found, done = self._awaited.get(str(metadata.get(PIPE_KEY)), ("", None, None))
        if found is None or done is None or who != opener or found.done():
            return False
        found.set_result(own)
        await done.wait()
        return True

    async def Carry(  # type: ignore[override]  # it writes as it goes
        self, requests: AsyncIterator[join_pb2.Chunk], context: Context
    ) -> None:
        if not await self.open(dict(context.invocation_metadata() or ()), "", ServedPipe(requests, context)):
            raise not_found(PIPE_NOT_AWAITED)


class RelayBudget:
    """Bytes that a relay may hold. Each pipe has its own share until it ends, so none waits for another's readers."""

    def __init__(self) -> None:
        self.held = Counter[frozenset[str]]()  # by a pipe's two machines
        self.carried = Counter[frozenset[str]]()

    @contextlib.contextmanager
    def pipe(self, *ends: str) -> Iterator[Callable[[int], None]]:
        """A pipe's share, for the duration of a `with` block. Yields a counter of bytes. Raises StatusError."""
        pair, names = frozenset(ends), " and ".join(ends)
        bounds = (names, self.held[pair], PAIR_BYTES), ("all machines", self.held.total(), RELAY_BYTES)
        for what, held, most in bounds:
            if held + PIPE_BYTES > most:
                raise exhausted(f"too many connections: the router can hold at most {most >> 20} MB for {what}", 1000)
        self.held[pair] += PIPE_BYTES
        try:
            yield lambda size: self.carried.update({pair: size})
        finally:
            self.held -= Counter({pair: PIPE_BYTES})  # without pairs that hold nothing: machines come and go
            log.info("%s: %d bytes relayed so far", names, self.carried[pair])


async def splice(first: Pipe, second: Pipe, count: Callable[[int], object] = lambda size: None) -> None:
    """Carry bytes both ways until one side ends. :param count: called with the size of each piece.

    TLS itself signals when a side is done, so a half-closed pipe has nothing more to carry.
    """

    async def carry(source: Pipe, target: Pipe) -> None:
        with contextlib.suppress(OSError, grpc.RpcError, asyncio.IncompleteReadError):
            while data := await source.read():
                await target.write(data)
                count(len(data))
        with contextlib.suppress(OSError, grpc.RpcError, asyncio.InvalidStateError):
            await target.end()

    tasks = [asyncio.create_task(carry(first, second)), asyncio.create_task(carry(second, first))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(tasks)
