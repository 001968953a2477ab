"""Routers that listen on this host for results and faults."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from stages.v1 import stage_pb2

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Events kept for a router that does not read them; later ones are dropped, its requests then end at their deadline."""

MOST_TOGETHER = 256
"""Events in one message."""


class Subscribers:
    """One bounded queue of events for each router."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[stage_pb2.Event]] = {}

    def __contains__(self, router: str) -> bool:
        return router in self.queues

    async def listen(self, router: str) -> AsyncGenerator[stage_pb2.Events, None]:
        """Events for `router`, those that are there at once together; the first message is empty.

        A second subscription of the same name takes over from the first.
        """
        queue: asyncio.Queue[stage_pb2.Event] = asyncio.Queue(MAX_WAITING)
        self.queues[router] = queue
        try:
            yield stage_pb2.Events()
            while True:
                events = stage_pb2.Events(events=[await queue.get()])
                while len(events.events) < MOST_TOGETHER and not queue.empty():
                    events.events.append(queue.get_nowait())
                yield events
        finally:
            if self.queues.get(router) is queue:
                del self.queues[router]

    def publish(self, router: str, event: stage_pb2.Event) -> None:
        queue = self.queues.get(router)
        if queue is None or queue.full():
            log.warning("an event of session %s is dropped: router %s does not read", event.session, router)
            return
        queue.put_nowait(event)
