"""Streams of server-sent events: one event, several sources as one, and signs of life while nothing comes."""

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

# Proxies and clients give up on a stream that says nothing: so long may its beginning take, and later each event.
FIRST_SILENCE_S, SILENCE_S = 2.0, 10.0
WAITING = b": waiting for the hosts\n\n"  # a comment, which readers of events skip

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the second tells nginx not to buffer events
DONE = b"data: [DONE]\n\n"


def sse(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """An answer of events, whose source is closed however the answer ends."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        """:param first: the first event, or comment, read before the answer begins."""
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
    """The answer with these events. An error before the first one has a status of its own, if it comes within
    FIRST_SILENCE_S; a later one can only be another event, as in OpenAI's API. Raises OnesweepError.

    :param requests: what the router calls them, once it has told.
    """
    heard = _with_comments(events)
    return EventStream(await anext(heard), heard, named(requests))


async def _with_comments(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Events as they come, and a comment where none comes for long. Raises OnesweepError."""
    silence_s = FIRST_SILENCE_S
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=silence_s)
            silence_s = SILENCE_S
            if not done:
                yield WAITING
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(events))
            yield event
    finally:
        await cancelled([coming])
        await events.aclose()


# Several streams as one.

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources as they come. The first error ends all of them, and so does leaving early."""
    # bounded: sources wait for the reader, and nothing piles up for a slow client
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
    """The items of a source, then its error, or None."""
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
