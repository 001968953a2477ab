"""Server-sent events: a stream of JSON that a browser and OpenAI's clients read as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.http.errors import api_error_of
from stages.errors import OnesweepError

DONE = b"data: [DONE]\n\n"


def sse(content: object) -> bytes:
    """One event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events; closes their source however the answer ends, so that nothing goes on behind it."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-store"}, media_type="text/event-stream")
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def begun(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """`events`, once the first is there: what fails before is raised here and has a status of its own.

    What fails later can only be told as one more event, OpenAI's way.
    """
    first = await anext(events)

    async def following() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except OnesweepError as error:
                yield sse(api_error_of(error).body)

    return following()
