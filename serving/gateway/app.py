"""The gateway: an ASGI application in front of one router, its middleware, and the process that serves it.

It is no part of the router: it needs no weights, can run on another machine or several times, and web traffic cannot
slow the router's event loop.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from http import HTTPMethod
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as FrameworkError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.client.client import AsyncClient
from serving.gateway.errors import OF_ALL, REQUEST_ID, ApiError, api_error_of, error_response
from serving.gateway.openai import routes as openai_routes
from serving.gateway.pages import host_routes, page_routes, race_routes
from serving.gateway.settings import HttpSettings
from stages.errors import OnesweepError
from stages.signals import stop_on_signals
from stages.telemetry.observability import Telemetry
from stages.telemetry.prometheus import Histogram, MetricFamily, MetricValues
from stages.wire.web_access import host_name, is_other_site, is_ours, page_headers
from stages.wire.web_server import WebServer, open_socket

log = logging.getLogger(__name__)

# Middleware: it checks headers, bounds bodies, cancels the handlers of clients that leave, logs and counts.

SECURITY_HEADERS = page_headers()  # headers of every answer


@dataclass(frozen=True)
class SiteGuard:
    """Accepts requests by the names of this server and from its own pages only."""

    names: frozenset[str] = frozenset()  # names of this server beside `localhost` and addresses

    def check(self, method: str, headers: Headers) -> None:
        """Raises ApiError: 403 for a wrong name or another site, 415 for a body that is not JSON."""
        host = headers.get("host", "")
        if not is_ours(host, self.names):
            raise ApiError(
                403,
                "this server is not known by the name in the Host header: use its address or localhost, "
                "or start it with --allow-host NAME",
                code="unknown_host",
            )
        if is_other_site(headers.get("origin"), host):
            raise ApiError(403, "a page of another site may not call this server", code="cross_origin")
        # browsers send forms and plain text from other sites' pages without asking us
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: send it with Content-Type: application/json")


MAX_BODY_BYTES = 2 << 20  # twice the longest prompt that can be sent on
BODY_S = 15.0
# Bodies that are being received may have so many bytes together, beside the first SMALL_BODY_BYTES of each: those who
# send large ones slowly keep nobody from a usual request.
BODIES_BYTES, SMALL_BODY_BYTES = 64 << 20, 64 << 10


class Gone(Exception):
    """The client closed the connection."""


class RequestBounds:
    """Middleware that reads the whole body first, and cancels the handler when the client leaves.

    The framework notices a lost client only when it sends, and a whole answer is sent once, at its end.
    """

    def __init__(self, app: ASGIApp, guard: SiteGuard) -> None:
        self.app, self.guard = app, guard
        self._received_bytes = 0  # of bodies that are not whole yet, beyond the small part of each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self.guard.check(scope["method"], headers)
            body = await self._read(receive, headers)
        except Gone:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, _with_headers(send))
            return
        await _while_connected(self.app(scope, _replay(body), _with_headers(send)), receive)

    async def _read(self, receive: Receive, headers: Headers) -> bytes:
        """The body. Raises ApiError if it is too large or too slow, or too many come, Gone if the client left."""
        too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less", code="body_too_large")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
            raise too_large
        closing = {"connection": "close"}  # the rest may never come
        body, more, counted = bytearray(), True, 0
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        raise too_large
                    grown = max(len(body) - SMALL_BODY_BYTES, 0) - counted
                    if grown and self._received_bytes + grown > BODIES_BYTES:
                        raise ApiError(
                            503,
                            "too many large bodies are on their way: send it later",
                            headers=closing | {"retry-after": "1"},
                        )
                    counted, self._received_bytes = counted + grown, self._received_bytes + grown
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:g} s: send it faster", headers=closing) from None
        finally:
            self._received_bytes -= counted
        return bytes(body)


def _replay(body: bytes) -> Receive:
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive() -> Message:
        nonlocal message
        if message is None:
            await asyncio.Event().wait()  # `_while_connected` reads the disconnect
        given, message = message, None
        assert given is not None
        return given

    return receive


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


def _with_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sender


HTTP_METRICS = (
    MetricFamily("onesweep_http_requests_total", "counter", "Ended requests, by HTTP status.", ("path", "status")),
    MetricFamily("onesweep_http_request_seconds", "histogram", "Until the end of the answer.", ("path",)),
)
OTHER = "other"  # the label of unknown paths and methods: clients choose them, so they must not become labels
LEFT = "left"  # the status of a request whose client left before its answer began


class HttpCounters:
    """Counters of a gateway."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, ...]] = Counter()
        self.seconds: dict[tuple[str, ...], Histogram] = {}

    def ended(self, path: str, status: str, seconds: float) -> None:
        self.statuses[path, status] += 1
        self.seconds.setdefault((path,), Histogram()).add(seconds)

    def read(self) -> MetricValues:
        """The values for a scrape."""
        return {"onesweep_http_requests_total": self.statuses, "onesweep_http_request_seconds": self.seconds}


class RequestLog:
    """Middleware that logs and counts every request, without any text that the client chose."""

    def __init__(self, app: ASGIApp, figures: HttpCounters) -> None:
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


# The application.

_ABOUT = """OpenAI-compatible completions over a ring of far-apart hosts. A byte model's tokens are bytes. Requests may
have an object `onesweep` with settings of ours; answers have `onesweep.accounting`: what the text cost."""


def make_app(settings: HttpSettings, client: AsyncClient, figures: HttpCounters) -> ASGIApp:
    """An app that talks to one router."""
    # no docs_url, no redoc_url: those pages load scripts from other servers
    app = FastAPI(title="onesweep", description=_ABOUT, docs_url=None, redoc_url=None, responses=OF_ALL)
    app.version = version("onesweep")
    app.state.client, app.state.settings = client, settings
    for routes in (openai_routes, race_routes, host_routes, page_routes()):
        app.include_router(routes)
    names = {host_name(settings.listen), *settings.allow_hosts} - {None}
    for kind in (RequestValidationError, FrameworkError, OnesweepError, Exception):
        app.add_exception_handler(kind, _answer)
    return RequestLog(RequestBounds(app, SiteGuard(frozenset(name.lower() for name in names if name))), figures)


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(api_error_of(error))


async def run_gateway(settings: HttpSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set and running answers have ended. Raises OnesweepError."""
    lookout = Telemetry(settings.seeing, "onesweep-http", "http", settings.insecure)
    client = AsyncClient(settings.router, tls=settings.router_tls, insecure=settings.insecure)
    figures = HttpCounters()
    app = make_app(settings, client, figures)
    server = WebServer(app, settings.tls_cert, settings.tls_key, drain_s=settings.drain_s)
    with open_socket(settings.listen) as listener:
        if settings.seeing.metrics is not None:
            lookout.serve(HTTP_METRICS, figures.read)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        log.info("http: live on %s, router %s", settings.url, settings.router)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving
    await client.close()
    await lookout.close()


def serve(settings: HttpSettings) -> None:
    """Run a gateway to its end. Raises OnesweepError."""

    async def until_signal() -> None:
        await run_gateway(settings, stop_on_signals())

    asyncio.run(until_signal())
