"""Streams of server-sent events: single events, merged sources, and comments that keep a quiet stream alive."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.gateway.errors import api_error_of, named
from stages.errors import OnesweepError
from stages.threads import cancelled

# Longest silence at the start of a stream, and later between events: proxies and clients give up on a silent stream.
FIRST_SILENCE_S, SILENCE_S = 2.0, 10.0
WAITING = b": waiting for the hosts\n\n"  # a comment, which event readers skip

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the second tells nginx not to buffer events
DONE = b"data: [DONE]\n\n"


def sse(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """An answer of events; its source is closed however the answer ends."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        """:param first: the first event or comment, read before the answer begins."""
        super().__init__(self._body(), headers=_HEADERS | headers, media_type="text/event-stream")
        self.first, self.events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events):
            await self.stream_response(send)

    async def _body(self) -> AsyncGenerator[bytes, None]:
        yield self.first
        try:
            async for event in self.events:
                yield event
        except OnesweepError as error:
            yield sse(api_error_of(error).body)


async def event_stream(events: AsyncGenerator[bytes, None], requests: Sequence[str] = ()) -> EventStream:
    """Make an answer of these events. An error before the first event gets its own status if it comes within
    FIRST_SILENCE_S; a later one can only become an event, as in OpenAI's API. Raises OnesweepError.

    :param requests: the router's names for the requests, once known.
    """
    stream = _with_comments(events)
    return EventStream(await anext(stream), stream, named(requests))


async def _with_comments(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield events as they come, and a comment when none comes for long. Raises OnesweepError."""
    silence_s = FIRST_SILENCE_S
    pending = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=silence_s)
            silence_s = SILENCE_S
            if not done:
                yield WAITING
                continue
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            pending = asyncio.ensure_future(anext(events))
            yield event
    finally:
        await cancelled([pending])
        await events.aclose()


# Merging of several streams.

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come. The first error ends all of them, and so does leaving early."""
    # bounded: sources wait for the reader, so nothing piles up for a slow client
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    left = len(pumps)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        await cancelled(pumps)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | Exception | None]) -> None:
    """Put the items of a source into the queue, then its error or None."""
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
