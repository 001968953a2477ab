"""The connections of a gRPC server: connections without an allowed call make room for new ones."""

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from stages.wire.status import Context, Interceptor, checked_handler

CHECK_S = 1.0  # between checks of the connections
OPEN_TO_ALL = "/grpc."  # health and reflection: such a call does not identify its caller
STRANGERS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_DESCRIPTORS = "/proc/self/fd"


class Places(Interceptor):
    """Closes the oldest connections without an allowed call if less than an eighth of the places is free.

    gRPC closes excess connections before any handler sees them, and does not list the ones it holds. They are found
    among the sockets of this process.
    """

    def __init__(self, most: int) -> None:
        """:param most: most connections that gRPC accepts."""
        self._kept = most - max(1, most // 8)
        self._callers = set[str]()
        self._silent: dict[str, None] = {}  # oldest first

    def answered_by(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        method: Any = call.method
        if method.startswith(OPEN_TO_ALL):
            return handler

        def note(request: object, context: Any) -> None:  # noqa: ANN401 - of Context, the stubs err
            host, _, port = unquote(context.peer().partition(":")[2]).rpartition(":")
            if (peer := _peer(host, port)) not in self._callers:
                self._callers.add(peer)  # at once, as the call may last
                context.add_done_callback(lambda call: self._ended(peer, call))

        return checked_handler(handler, note)

    def _ended(self, peer: str, call: Context) -> None:
        """Forget a caller whose first call was refused as a stranger's."""
        if call.code() in STRANGERS:
            self._callers.discard(peer)

    def watch(self, server: grpc.aio.Server, port: int) -> None:
        """Make room on a port at intervals, until the server has stopped."""
        self._watching = asyncio.create_task(self._watch(server, port))

    async def _watch(self, server: grpc.aio.Server, port: int) -> None:
        with suppress(asyncio.CancelledError):  # the task would keep it, and so the server, which then is never freed
            while await server.wait_for_termination(CHECK_S):
                with suppress(OSError):  # no descriptor is left for the check
                    if max(len(self._callers), len(os.listdir(_DESCRIPTORS))) > self._kept:
                        await self.make_room(port)

    async def make_room(self, port: int) -> None:
        """Close connections above seven eighths of the places, and forget callers that have left. Raises OSError."""
        before = {*self._callers}  # do not forget those who call meanwhile
        held = await asyncio.to_thread(lambda: {peer for peer, _ in _connections(port)})
        self._callers -= before - held
        silent = held - self._callers
        self._silent = dict.fromkeys(peer for peer in (*self._silent, *silent) if peer in silent)
        if leaving := {*islice(self._silent, max(0, len(held) - self._kept))}:
            await asyncio.to_thread(self._close, port, leaving)

    def _close(self, port: int, leaving: set[str]) -> None:
        for peer, connection in _connections(port):
            if peer in leaving and peer not in self._callers:
                with suppress(OSError):  # the connection has just ended
                    connection.shutdown(socket.SHUT_RDWR)


def _connections(port: int) -> Iterator[tuple[str, socket.socket]]:
    """The peers of a port of this process, each with a copy of its descriptor: gRPC may close its own at any time, and
    another file may then get the number. Raises OSError."""
    for number in os.listdir(_DESCRIPTORS):
        try:
            # closing a copy of a file's descriptor would drop this process's locks on the file
            if os.readlink(f"{_DESCRIPTORS}/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                        yield _peer(*found.getpeername()[:2]), found
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.EBADF, errno.ENOTCONN):  # closed, or a listening socket
                raise


def _peer(ip: str, port: int | str) -> str:
    """An end of a connection, in the same form from gRPC and from a socket."""
    return f"{ip.strip('[]').partition('%')[0].removeprefix('::ffff:')} {port}"
