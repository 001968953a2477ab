"""The client side of gRPC's aio interface over a `MemoryNetwork`: channels and calls for the same stubs.

A message is serialized, travels, and is parsed on the other side. Failures have gRPC's own statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any

import grpc.aio
from grpc import StatusCode

from loadtest.simulation.loop import Process, here
from loadtest.simulation.network import RESET, SMALL_BYTES, Connection, Direction, MemoryNetwork
from loadtest.simulation.served import FlowWindow, MemoryServer, Pairs, ServedCall, Stream
from stages.wire.status import CALL_KINDS

HEADER_BYTES = 100  # at the start of a call
CONNECT_S = 5.0
BACKOFF_S, MAX_BACKOFF_S, BACKOFF_GROWS = 0.1, 2.0, 1.6
REFUSED = "failed to connect to all addresses; last error: UNAVAILABLE: Connection refused"
UNTRUSTED = "failed to connect to all addresses; last error: UNKNOWN: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"
TIMED_OUT = "failed to connect to all addresses; last error: UNAVAILABLE: connection attempt timed out"


class MemoryCall(AsyncIterator[Any]):
    """A call on the client's side."""

    def __init__(
        self,
        channel: MemoryChannel,
        kind: str,
        path: str,
        write: Callable[[Any], bytes],
        read: Callable[[bytes], Any],
        request: Any,  # noqa: ANN401 - a message, or an iterator of them
        timeout: float | None = None,
        metadata: Pairs = (),
        wait_for_ready: bool | None = None,
    ) -> None:
        self.channel, self.path, self.waits, self.metadata = channel, path, bool(wait_for_ready), metadata
        self.loop = channel.network.loop
        self._write, self._read, self._request, self._streams = write, read, request, kind.startswith("stream")
        self._headers: asyncio.Future[None] = self.loop.create_future()
        self._initial: Pairs = ()
        self._trailing: Pairs = ()
        self._code: StatusCode | None = None
        self._details, self._is_cancelled = "", False
        self._connection: Connection | None = None
        self._served: ServedCall | None = None
        self.window, self._answers = FlowWindow(), Stream()
        self._writer: asyncio.Task[None] | None = None
        self._due_at = None if timeout is None else self.loop.time() + timeout
        late = StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
        self._timer = None if self._due_at is None else self.loop.call_at(self._due_at, self._quit, *late)
        if channel.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        channel.begin(self)

    # Called by the network.

    def begin(self, connection: Connection) -> None:
        if self._code is not None:
            return
        self._connection = connection
        connection.calls[self] = None
        left_s = None if self._due_at is None else self._due_at - self.loop.time()
        self._served = ServedCall(connection, self, left_s)
        if self._streams:
            connection.send(HEADER_BYTES, self._served.start, None)
            self._writer = self.loop.create_task(self._write_requests(connection, self._served))
        else:
            data = self._write(self._request)
            connection.send(HEADER_BYTES + len(data), self._served.start, data)

    def lose(self, why: str) -> None:
        self.end(StatusCode.UNAVAILABLE, why, ())

    def hear(self, initial: Pairs, data: bytes | None) -> None:
        """Receive the server's initial metadata or a message."""
        self._initial = initial
        if not self._headers.done():
            self._headers.set_result(None)
        if data is None:
            return
        if len(data) > self.channel.max_bytes:
            words = f"CLIENT: Received message larger than max ({len(data)} vs. {self.channel.max_bytes})"
            self._quit(StatusCode.RESOURCE_EXHAUSTED, words)
        else:
            self._answers.put(data)

    def end(
        self, code: StatusCode, details: str, trailing: Pairs, initial: Pairs = (), one: bytes | None = None
    ) -> None:
        """Set the call's status, unless it has one, together with its answer if there is just one."""
        if one is not None:
            self.hear(initial, one)
        if self._code is not None:
            return
        self._code, self._details, self._trailing = code, details, trailing
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.cancel()
        if self._connection is not None:
            self._connection.calls.pop(self, None)
        self.channel.waiting.pop(self, None)
        self._served = None
        if not self._headers.done():
            self._headers.set_result(None)
        self._answers.put()

    def _quit(self, code: StatusCode, details: str) -> None:
        if self._connection is not None and self._served is not None:
            self._connection.send(SMALL_BYTES, self._served.cancel)
        self.end(code, details, ())

    def _release_window(self, size: int) -> None:
        if self._connection is not None and self._served is not None:
            self._connection.send(SMALL_BYTES, self._served.window.release, size)

    async def _write_requests(self, connection: Connection, served: ServedCall) -> None:
        async for request in self._request:
            data = self._write(request)
            await self.window.reserve(len(data))
            connection.send(len(data), served.requests.put, data)
        connection.send(SMALL_BYTES, served.requests.put)

    # Used by callers: the interface of gRPC's calls.

    def cancel(self) -> bool:
        if self._code is not None:
            return False
        self._is_cancelled = True
        self._quit(StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    async def initial_metadata(self) -> grpc.aio.Metadata:
        try:
            await self._headers
        except asyncio.CancelledError:
            self.cancel()
            raise
        return grpc.aio.Metadata(*self._initial)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__anext__().__await__()

    async def __anext__(self) -> Any:  # noqa: ANN401
        try:
            data = await self._answers.get(self._release_window)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if data is not None:
            return self._read(data)
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._code is StatusCode.OK:
            raise StopAsyncIteration
        assert self._code is not None
        metadata = grpc.aio.Metadata(*self._initial), grpc.aio.Metadata(*self._trailing)
        raise grpc.aio.AioRpcError(self._code, *metadata, self._details)


class MemoryChannel:
    """A channel that replaces `grpc.aio.insecure_channel`."""

    def __init__(self, network: MemoryNetwork, address: str, options: Sequence[tuple[str, int]] = ()) -> None:
        """:param options: gRPC's."""
        self.network, self.process, self.address = network, here(), address
        self.max_bytes = dict(options).get("grpc.max_receive_message_length", 4 << 20)
        self.connection: Connection | None = None
        self.closed = self._dialling = False
        self.waiting: dict[MemoryCall, None] = {}
        self._attempt, self._backoff_s, self._again_at, self._problem = 0, 0.0, 0.0, ""

    def __getattr__(self, kind: str) -> Callable[..., Callable[..., MemoryCall]]:
        """One of CALL_KINDS, which makes a method's callable."""
        if kind not in CALL_KINDS:
            raise AttributeError(kind)

        def method(path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:  # noqa: ANN401
            return partial(MemoryCall, self, kind, path, request_serializer, response_deserializer)

        return method

    def begin(self, call: MemoryCall) -> None:
        """Start a call once there is a connection; a call that does not wait fails while no connection is possible."""
        if self.connection is not None:
            call.begin(self.connection)
        elif not call.waits and self.network.loop.now_s < self._again_at:
            self.process.call_at(self.network.loop.now_s, call.lose, self._problem)
        else:
            self.waiting[call] = None
            if not self._dialling:
                self._dialling = True
                self.process.call_at(max(self._again_at, self.network.loop.now_s), self._dial)

    async def close(self, grace: float | None = None) -> None:
        """:param grace: as in gRPC, but running calls end at once whatever it is."""
        self.closed = True
        for call in [*self.waiting, *(self.connection.calls if self.connection else ())]:
            call.cancel()
        if (connection := self.connection) is not None:
            connection.send(SMALL_BYTES, connection.lose_server, RESET)
            self.connection = None
            if connection in self.network.connections:
                self.network.connections.remove(connection)

    def _dial(self) -> None:
        self._attempt += 1
        place = self.network.places.get(self.address)
        if place is None:
            self._failed(self._attempt, REFUSED)
            return
        there, back = self.network.link(self.process.place, place), self.network.link(place, self.process.place)
        self.network.send(there, SMALL_BYTES, self.process, self._reached_server, (self._attempt, back))
        self.process.call_at(self.network.loop.now_s + CONNECT_S, self._failed, self._attempt, TIMED_OUT)

    def _reached_server(self, attempt: int, back: Direction) -> None:
        """Arrive at the other machine, which refuses if nothing listens there, or nothing any more."""
        if (found := self.network.servers.get(self.address)) is None:
            self.network.send(back, SMALL_BYTES, self.process, self._failed, (attempt, REFUSED))
        else:
            answer = back, SMALL_BYTES, self.process, self._made, (attempt, found)
            found[0].call_at(self.network.loop.now_s, self.network.send, *answer)

    def _made(self, attempt: int, found: tuple[Process, MemoryServer]) -> None:
        if attempt != self._attempt or not self._dialling:
            return
        self._dialling, self._backoff_s = False, 0.0
        ends = {self.process.place, found[0].place}
        untrusted = any(kind in ("untrusted", "month") and at in ends for kind, at in self.network.states)
        if found[0].killed or untrusted:
            self._dialling = True
            self._failed(attempt, UNTRUSTED if untrusted else RESET)
            return
        self.connection = Connection(self, found[1], found[0])
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.begin(self.connection)

    def _failed(self, attempt: int, why: str) -> None:
        if attempt != self._attempt or not self._dialling:
            return
        self._backoff_s = min(max(self._backoff_s * BACKOFF_GROWS, BACKOFF_S), MAX_BACKOFF_S)
        self._again_at, self._problem = self.network.loop.now_s + self._backoff_s, why
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            if call.waits:
                self.waiting[call] = None
            else:
                call.lose(why)
        self._dialling = bool(self.waiting)
        if self._dialling:
            self.process.call_at(self._again_at, self._dial)
