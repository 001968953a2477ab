"""The server side of gRPC's aio interface over a `MemoryNetwork`, for the real servers' servicers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc import StatusCode

from loadtest.simulation.loop import CALLER, here
from loadtest.simulation.network import SMALL_BYTES, Connection, MemoryNetwork
from stages.wire.status import kind_of

if TYPE_CHECKING:
    from loadtest.simulation.calls import MemoryCall

# Unread bytes of one direction of a call beyond which the writer waits (HTTP/2's windows, and the buffers of gRPC and
# the kernels).
WINDOW_BYTES = 256 << 10
NO_READER = asyncio.Event()  # used until a reader has to wait: nearly all calls end before

Pairs = Sequence[tuple[str, Any]]


class Stream:
    """One direction of a call on the reader's side: messages received, and the end."""

    def __init__(self) -> None:
        self._messages, self._arrived, self._unreported = deque[bytes | None](), NO_READER, 0

    def put(self, data: bytes | None = None) -> None:
        """Add a message or the end."""
        self._messages.append(data)
        self._arrived.set()

    async def get(self, release: Callable[[int], object]) -> bytes | None:
        """The next message; None after the last.

        :param release: tells the writer of bytes read."""
        while not self._messages:
            self._arrived = asyncio.Event()
            await self._arrived.wait()
        if (data := self._messages[0]) is None:  # the end stays
            return None
        self._messages.popleft()
        self._unreported += len(data)
        if self._unreported > WINDOW_BYTES // 2:
            release(self._unreported)
            self._unreported = 0
        return data


class FlowWindow:
    """One direction of a call on the writer's side."""

    def __init__(self) -> None:
        self._left, self._opened = WINDOW_BYTES, NO_READER

    async def reserve(self, size: int) -> None:
        """Wait until the reader has made room."""
        while self._left <= 0:
            self._opened = asyncio.Event()
            await self._opened.wait()
        self._left -= size

    def release(self, size: int) -> None:
        self._left += size
        self._opened.set()


class ServedCall:
    """A call on the server's side, with the interface of `grpc.aio.ServicerContext`."""

    def __init__(self, connection: Connection, call: MemoryCall, left_s: float | None) -> None:
        """:param left_s: time to the client's deadline when the call left."""
        self._connection, self._call, self._left_s = connection, call, left_s
        self.window, self.requests = FlowWindow(), Stream()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._due_at: float | None = None
        self._initial: Pairs = ()
        self._trailing: Pairs = ()
        self._one: bytes | None = None  # a single answer, which travels with the status, as in gRPC
        self._status: tuple[StatusCode, str] | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def start(self, data: bytes | None) -> None:
        """Start the arrived call. :param data: its request; None for a stream of requests."""
        self._connection.served[self] = None
        loop = self._connection.network.loop
        if self._left_s is not None:
            self._due_at = loop.time() + self._left_s
            self._timer = loop.call_at(self._due_at, self.cancel)
        self._task = loop.create_task(self._serve(data))

    def cancel(self) -> None:
        """Cancel, because the client has left or its deadline has passed."""
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _serve(self, data: bytes | None) -> None:
        code, details = StatusCode.OK, ""
        CALLER.set(self._connection.client.place)
        try:
            await self._handle(data)
        except asyncio.CancelledError:
            code, details = StatusCode.CANCELLED, "the call was cancelled"
        except grpc.aio.AbortError:
            pass
        except Exception as error:
            code, details = StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"
        if self._timer is not None:
            self._timer.cancel()
        self._connection.served.pop(self, None)
        code, details = self._status or (code, details)
        one, size = self._one, SMALL_BYTES + len(self._one or b"")
        self._connection.answer(size, self._call.end, code, details, self._trailing, self._initial, one)
        for callback in self._callbacks:
            callback(self)

    async def _handle(self, data: bytes | None) -> None:
        if ("token", self._connection.server.place) in self._connection.network.states:
            await self.abort(StatusCode.UNAUTHENTICATED, "this needs a token: give --token-file")
        handler = await self._connection.serves.handler(self._call.path, self._call.metadata)
        if handler is None:
            await self.abort(StatusCode.UNIMPLEMENTED, "Method not found!")
        kind, answer = kind_of(handler)
        self._parse, self._write = handler.request_deserializer, handler.response_serializer
        request: Any = self._each(data) if kind.startswith("stream") else await self._read(data)
        answers = answer(request, self)
        if kind.endswith("unary"):
            if (one := await answers) is not None:
                self._one = self._write(one)
        elif hasattr(answers, "__aiter__"):
            async for each in answers:
                await self.write(each)
        else:
            await answers

    async def _each(self, first: bytes | None) -> AsyncIterator[Any]:
        """:param first: the only request, if the handler gets a single request as a stream."""
        if first is not None:
            yield await self._read(first)
            return
        while (data := await self.requests.get(self._release_window)) is not None:
            yield await self._read(data)

    async def _read(self, data: bytes | None) -> Any:  # noqa: ANN401
        assert data is not None
        if len(data) > (max_bytes := self._connection.serves.max_bytes):
            words = f"SERVER: Received message larger than max ({len(data)} vs. {max_bytes})"
            await self.abort(StatusCode.RESOURCE_EXHAUSTED, words)
        return self._parse(data)

    def _release_window(self, size: int) -> None:
        self._connection.answer(SMALL_BYTES, self._call.window.release, size)

    # Used by servicers.

    async def write(self, message: Any) -> None:  # noqa: ANN401
        data = self._write(message)
        await self.window.reserve(len(data))
        self._connection.answer(len(data) + SMALL_BYTES, self._call.hear, self._initial, data)

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Pairs = ()) -> None:
        self._status = code, details
        self._trailing = trailing_metadata or self._trailing
        raise grpc.aio.AbortError("Locally aborted.")

    async def send_initial_metadata(self, metadata: Pairs) -> None:
        self._initial = metadata
        self._connection.answer(SMALL_BYTES, self._call.hear, metadata, None)

    def set_trailing_metadata(self, metadata: Pairs) -> None:
        self._trailing = metadata

    def trailing_metadata(self) -> Pairs:
        return self._trailing

    def invocation_metadata(self) -> Pairs:
        return self._call.metadata

    def time_remaining(self) -> float | None:
        return None if self._due_at is None else max(self._due_at - self._connection.network.loop.time(), 0.0)

    def auth_context(self) -> dict[str, Any]:
        return {}

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)


class MemoryServer:
    """A server, for the generated `add_..._to_server`."""

    def __init__(self, network: MemoryNetwork, interceptors: Sequence[Any] = (), max_bytes: int = 4 << 20) -> None:
        self.network, self.max_bytes = network, max_bytes
        self._interceptors, self._handlers, self._made = interceptors, dict[str, Any](), dict[str, Any]()

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: these are the handlers registered before."""

    def listen(self, address: str) -> None:
        """Accept calls from now on, on the running process's machine."""
        self.network.places[address] = here().place
        self.network.servers[address] = here(), self

    async def handler(self, path: str, metadata: Pairs) -> Any:  # noqa: ANN401
        """The handler of a method, made by the interceptors at its first call: none of them reads metadata."""
        if path not in self._made:
            details: Any = SimpleNamespace(method=path, invocation_metadata=metadata)

            async def own(_: object) -> Any:  # noqa: ANN401
                return self._handlers.get(path)

            following = own
            for each in reversed(self._interceptors):
                following = partial(each.intercept_service, following)
            self._made[path] = await following(details)
        return self._made[path]
