"""Server-sent events: a stream of JSON that a browser and OpenAI's clients read as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.http.errors import api_error_of
from stages.errors import OnesweepError

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""The second for nginx, which would hold events back until it has some kilobytes of them."""
DONE = b"data: [DONE]\n\n"


def sse(content: object) -> bytes:
    """One event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events; closes their source however the answer ends, so that nothing goes on behind it."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
    ) -> None:
        """:param first: taken from `events` already: what fails before has a status of its own, and what fails later
        can only be told as one more event, OpenAI's way."""
        super().__init__(events, headers={**_HEADERS, **(headers or {})}, media_type="text/event-stream")
        self.first, self.events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(event: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": more})

        async with aclosing(self.events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await tell(self.first)
            try:
                async for event in self.events:
                    await tell(event)
            except OnesweepError as error:
                await tell(sse(api_error_of(error).body))
        await tell(b"", more=False)
