"""Server-sent events, and several sources of events as one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.gateway.errors import api_error_of
from stages.errors import OnesweepError

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the second tells nginx not to buffer events
DONE = b"data: [DONE]\n\n"


def sse(content: object) -> bytes:
    """One event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """An answer of events, whose source is closed however the answer ends."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
    ) -> None:
        """:param first: the first event, read before the answer begins: an error before it has a status of its own; a
        later one can only be another event, as in OpenAI's API.
        """
        super().__init__(events, headers={**_HEADERS, **(headers or {})}, media_type="text/event-stream")
        self.first, self.events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(event: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": more})

        async with aclosing(self.events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await write(self.first)
            try:
                async for event in self.events:
                    await write(event)
            except OnesweepError as error:
                await write(sse(api_error_of(error).body))
        await write(b"", more=False)


# Several streams as one.

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    error: Exception | None


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources as they come. The first error ends all of them, and so does leaving early."""
    # bounded: sources wait for the reader, and nothing piles up for a slow client
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    left = len(pumps)
    try:
        while left:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                left -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as caught:
        error = caught
    await queue.put(_End(error))
