"""ASGI middleware: a line in the log and a count for each request, with nothing in them that a client made up."""

from __future__ import annotations

import logging
import time
from collections import Counter
from http import HTTPMethod

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.errors import REQUEST_ID
from stages.figures import Buckets, Family, Figures

log = logging.getLogger(__name__)

HTTP_METRICS = (
    Family("onesweep_http_requests_total", "counter", "Ended requests, by HTTP status.", ("path", "status")),
    Family("onesweep_http_request_seconds", "histogram", "Until the end of the answer.", ("path",)),
)
OTHER = "other"
"""What a path that does not exist is called, and a method."""
LEFT = "left"
"""The status of a request whose client left before its answer began."""


class HttpFigures:
    """Counts what a gateway does."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, ...]] = Counter()
        self.seconds: dict[tuple[str, ...], Buckets] = {}

    def ended(self, path: str, status: str, seconds: float) -> None:
        self.statuses[path, status] += 1
        self.seconds.setdefault((path,), Buckets()).add(seconds)

    def read(self) -> Figures:
        """What a scrape reads."""
        return {"onesweep_http_requests_total": self.statuses, "onesweep_http_request_seconds": self.seconds}


class Visits:
    """Wraps an app."""

    def __init__(self, app: ASGIApp, figures: HttpFigures) -> None:
        self.app, self.figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status, request = time.perf_counter(), LEFT, ""

        async def sender(message: Message) -> None:
            nonlocal status, request
            if message["type"] == "http.response.start":
                status, request = str(message["status"]), Headers(raw=message["headers"]).get(REQUEST_ID, "")
            await send(message)

        try:
            await self.app(scope, receive, sender)
        finally:
            seconds = time.perf_counter() - begin
            method = scope["method"] if scope["method"] in HTTPMethod.__members__ else OTHER
            path = getattr(scope.get("route"), "path", OTHER)
            self.figures.ended(path, status, seconds)
            log.info(
                "%s %s %s, %.1f ms%s",
                *(method, path, status, seconds * 1000, f", request {request}" if request else ""),
                extra={
                    "request": request,
                    "method": method,
                    "path": path,
                    "status": status,
                    "ms": round(seconds * 1000, 3),
                },
            )
