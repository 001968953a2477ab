"""The HTTP protocol of a connection, which nobody may hold open for ever."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""From the first byte of a head to its last; uvicorn itself would wait for ever. Bodies: `reception.BODY_S`."""
UNREAD_S = 60.0
"""What was sent is to be read within that time."""


class Connection(H11Protocol):
    """Ends where the next request does not come in time, or the answer is not read."""

    max_connections = 1000
    """One more is closed at once."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=1, low=0)  # so that the last bytes of an answer are watched, too
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._see_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._see_read()

    @property
    def _waits(self) -> bool:
        """Whether all that is to come is a head, or the rest of a body that was answered without it."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self) -> None:
        if not self._waits:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._end)

    def _end(self) -> None:
        self._late = None
        if self._waits:
            self.transport.abort()

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _see_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
