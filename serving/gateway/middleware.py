"""The gateway's middleware: checks headers, limits bodies, cancels handlers when clients leave, logs and counts."""

import asyncio
import logging
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Collection
from http import HTTPMethod
from itertools import chain

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.gateway.errors import REQUEST_ID, ApiError, error_response
from stages.telemetry.prometheus import Histogram, MetricFamily, MetricValues
from stages.wire.channel import ip_of

log = logging.getLogger(__name__)


def host_name(host: str) -> str | None:
    """The name or address in a Host header, in lower case; None if it is invalid."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", host)
    return match[1].strip("[]").rstrip(".").lower() if match else None


# On every answer: a page runs only its own scripts, talks only to its own server, and cannot be framed.
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


# Limit on a request without its body.
MAX_HEAD_BYTES = 64 << 10
FULL = "full"  # in the state of a request over a connection too many
CLOSING = {"connection": "close"}  # the rest of the body may never arrive


def check_site(names: Collection[str], method: str, headers: Headers) -> None:
    """Accept requests only under this server's names and from its own pages.

    :param names: this server's names, in addition to `localhost` and addresses.

    Raises ApiError: 403 for a wrong name or site, 415 for a body that is not JSON, 400 for an ambiguous body length.
    """
    # by DNS rebinding, another site's page can reach this machine under that site's name; addresses cannot be rebound
    # HTTP/1.0, as of a load balancer's probe, may lack the header; browsers always send it
    name = host_name(host := headers.get("host", ""))
    if "host" in headers and (name is None or not (name == "localhost" or name in names or ip_of(name))):
        raise ApiError(
            403,
            "this server is not known by the name in the Host header: use its address or localhost, "
            "or start it with --allow-host NAME",
            code="unknown_host",
        )
    origin = headers.get("origin")
    if origin is not None and (not host or origin.lower().partition("://")[2] != host.lower()):
        raise ApiError(403, "a page of another site may not call this server", code="cross_origin")
    # browsers send forms and plain text from other sites' pages without a preflight request
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send it with Content-Type: application/json")
    if "content-length" in headers and "transfer-encoding" in headers:
        raise ApiError(400, "send Content-Length or Transfer-Encoding, not both", headers=CLOSING)


def unreadable() -> ApiError:
    words = f"this is not HTTP/1.1, or its head is larger than {MAX_HEAD_BYTES} bytes"
    return ApiError(400, words, headers=CLOSING | SECURITY_HEADERS)


MAX_BODY_BYTES = 2 << 20  # twice the longest prompt that the router accepts
GZIP = zlib.MAX_WBITS | 16
BODY_S = 15.0
# Limit on all bodies being received together, not counting the first SMALL_BODY_BYTES of each: clients that send large
# bodies slowly do not block requests of normal size.
BODIES_BYTES, SMALL_BODY_BYTES = 64 << 20, 64 << 10


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less", code="body_too_large")


def _busy(reason: str) -> ApiError:
    return ApiError(503, f"{reason}: try again later", headers=CLOSING | {"retry-after": "1"})


class RequestBounds:
    """Middleware that reads the whole body first, and cancels the handler when the client leaves.

    The framework notices a lost client only when it sends, and it sends a whole answer only once, at the end.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """:param names: as of `check_site`."""
        self.app, self.names = app, names
        self._received_bytes = 0  # of incomplete bodies, beyond each one's first SMALL_BODY_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if sum(map(len, (scope["raw_path"], scope["query_string"], *chain(*headers.raw)))) > MAX_HEAD_BYTES:
                raise unreadable()
            if scope.get("state", {}).get(FULL):
                raise _busy("every connection of this server has a request")
            check_site(self.names, scope["method"], headers)
            if (body := await self._read(receive, headers)) is None:
                return
            body = _unpacked(body, headers)
        except ApiError as error:
            await error_response(error)(scope, receive, _with_headers(send))
            return
        await _while_connected(self.app(scope, _replay(body), _with_headers(send)), receive)

    async def _read(self, receive: Receive, headers: Headers) -> bytes | None:
        """Receive the body; None if the client left. Raises ApiError if it is too large or slow, or too many come."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
            raise _too_large()
        body, more, counted = bytearray(), True, 0
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_large()
                    grown = max(len(body) - SMALL_BODY_BYTES, 0) - counted
                    if grown and self._received_bytes + grown > BODIES_BYTES:
                        raise _busy("too many large bodies are in flight")
                    counted, self._received_bytes = counted + grown, self._received_bytes + grown
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body took more than {BODY_S:g} s: send it faster", headers=CLOSING) from None
        finally:
            self._received_bytes -= counted
        return bytes(body)


def _unpacked(body: bytes, headers: Headers) -> bytes:
    """Unpack a body that its headers declare as gzip. Raises ApiError."""
    packing = headers.get("content-encoding", "identity").strip().lower()
    if packing == "identity":
        return body
    if packing != "gzip":
        raise ApiError(415, f"the body is encoded as {packing[:20]!r}: send it plain, or as gzip")
    unpacking = zlib.decompressobj(GZIP)
    try:
        unpacked = unpacking.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error:
        raise ApiError(400, "the body is not gzip: send it plain", code="invalid_gzip") from None
    if len(unpacked) > MAX_BODY_BYTES:
        raise _too_large()
    if not unpacking.eof or unpacking.unused_data:
        raise ApiError(400, "the body does not end where its gzip data end: send all of it", code="invalid_gzip")
    return unpacked


def as_plain(scope: Scope) -> Scope:
    """A request in the form that the routes expect: GET instead of HEAD, whose body the server omits; a path without a
    final slash; and an absolute request line, as sent to proxies, split into Host and path."""
    plain = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
    if absolute := re.match("https?://([^/]*)(.*)", scope["path"], re.IGNORECASE | re.DOTALL):
        others = [each for each in scope["headers"] if each[0] != b"host"]
        plain["headers"] = [*others, (b"host", absolute[1].encode())]
        plain["path"] = absolute[2]
    plain["path"] = plain["path"].rstrip("/") or "/"
    return plain


def _replay(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # `_while_connected` reads the disconnect
        return messages.pop()

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
    MetricFamily("onesweep_http_request_seconds", "histogram", "Time to the end of the answer.", ("path",)),
)
OTHER = "other"  # label of unknown paths and methods: clients choose these, so they must not become labels
PROBES = {"/healthz", "/readyz"}  # asked every few seconds: a success is not worth a line
CLIENT_LEFT = "left"  # status of a request whose client left before the answer began


class RequestLog:
    """Middleware that logs and counts every request, without any text chosen by the client."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.statuses: Counter[tuple[str, ...]] = Counter()
        self.seconds: dict[tuple[str, ...], Histogram] = {}

    def read(self) -> MetricValues:
        """The values for a scrape."""
        return {"onesweep_http_requests_total": self.statuses, "onesweep_http_request_seconds": self.seconds}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status, request, plain = time.perf_counter(), CLIENT_LEFT, "", as_plain(scope)

        async def sender(message: Message) -> None:
            nonlocal status, request
            if message["type"] == "http.response.start":
                status, request = str(message["status"]), Headers(raw=message["headers"]).get(REQUEST_ID, "")
            await send(message)

        try:
            await self.app(plain, receive, sender)
        finally:
            seconds = time.perf_counter() - begin
            method = scope["method"] if scope["method"] in HTTPMethod.__members__ else OTHER
            path = getattr(plain.get("route"), "path", OTHER)
            self.statuses[path, status] += 1
            self.seconds.setdefault((path,), Histogram()).add(seconds)
            record = {"request": request, "method": method, "path": path, "status": status}
            log.log(
                logging.DEBUG if path in PROBES and status == "200" else logging.INFO,
                "%s %s %s, %.1f ms%s",
                *(method, path, status, seconds * 1000, f", request {request}" if request else ""),
                extra=record | {"ms": round(seconds * 1000, 3)},
            )
