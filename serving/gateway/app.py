"""The gateway: an ASGI application in front of one router, and the process that serves it: uvicorn on one socket,
with limits and a renewable certificate.

It is separate from the router: it needs no weights, can run on another machine or several times, and web traffic
cannot slow the router's event loop.
"""

import asyncio
import logging
import math
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as FrameworkError
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.client.client import AsyncClient
from serving.gateway.errors import COMMON_ERRORS, api_error_of, error_response
from serving.gateway.middleware import (
    FULL,
    HTTP_METRICS,
    MAX_HEAD_BYTES,
    RequestBounds,
    RequestLog,
    host_name,
    unreadable,
)
from serving.gateway.openai import routes as openai_routes
from serving.gateway.openai import token_routes
from serving.gateway.pages import host_routes, page_routes, race_routes
from serving.gateway.settings import HttpSettings
from stages.errors import InputError, OnesweepError, ServiceError, file_errors
from stages.signals import RESERVED, descriptor_limit, free_descriptors
from stages.telemetry.observability import Telemetry
from stages.wire.channel import parse_address
from stages.wire.secret_files import check_secret, stamp_of
from stages.wire.tls import Stamp

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1000
BACKLOG = 512

_ABOUT = """OpenAI-compatible completions over a ring of far-apart hosts. A byte model's tokens are bytes. Requests may
have an object `onesweep` with further settings; answers have `onesweep.accounting`: what the text cost."""


def make_app(settings: HttpSettings, client: AsyncClient) -> RequestLog:
    """An app that talks to one router."""
    # no docs_url, no redoc_url: those pages load scripts from other servers
    app = FastAPI(title="onesweep", description=_ABOUT, docs_url=None, redoc_url=None, responses=COMMON_ERRORS)
    app.version = version("onesweep")
    app.state.client, app.state.settings = client, settings
    for routes in (openai_routes, token_routes, race_routes, host_routes, page_routes()):
        app.include_router(routes)
    names = {host_name(settings.listen), *settings.allow_hosts} - {None}
    for kind in (RequestValidationError, FrameworkError, OnesweepError, Exception):
        app.add_exception_handler(kind, _answer)
    return RequestLog(RequestBounds(app, frozenset(name.lower() for name in names if name)))


async def _answer(request: Request, error: Exception) -> Response:
    body = getattr(request.scope.get("route"), "body_field", None)
    return error_response(api_error_of(error, request.url.path, body and body.field_info.annotation))


async def run_gateway(settings: HttpSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set and running answers have ended. Raises OnesweepError."""
    lookout = Telemetry(settings.seeing, settings.insecure)
    client = AsyncClient(settings.router, tls=settings.router_tls, token="", insecure=settings.insecure)
    app = make_app(settings, client)
    server = WebServer(app, settings)
    with open_socket(settings.listen) as listener:
        lookout.serve(HTTP_METRICS, app.read)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        log.info("http: live on %s, router %s", settings.url, settings.router)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving
    await client.close()
    await lookout.close()


class OwnCertificate:
    """A server's certificate for browsers, looked up for every handshake, so that renewal needs no restart."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises InputError."""
        self.certificate, self.key = certificate, key
        self._stamp = self._stamp_now()
        # The server's context; each handshake switches to the newest.
        self.context = self._newest = _read(certificate, key)
        self.context.sni_callback = self._show

    def _stamp_now(self) -> Stamp:
        return stamp_of(self.certificate), stamp_of(self.key)

    def _show(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._newest = _read(self.certificate, self.key)
                log.info("new certificate %s", self.certificate)
            except InputError as error:  # perhaps only one file is replaced so far: read again at the next change
                log.warning("new certificate rejected: %s", error)
        connection.context = self._newest


class _Connection(H11Protocol):
    """A connection that yields to newer ones while it has no request, and stays open while one arrives."""

    # When it was opened or its last answer ended, by the loop's clock.
    idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self.limit_concurrency is not None
        # uvicorn would refuse in plain text: `handle_events` counts instead
        self._limit, self.limit_concurrency = self.limit_concurrency, None
        if len(self.connections) >= self._limit and (idle := self._longest_idle()):
            self.connections.discard(idle)
            idle.transport.abort()
        self.idle_since = self.loop.time()
        super().connection_made(transport)  # type: ignore[arg-type]

    def handle_events(self) -> None:
        self.app_state[FULL] = len(self.connections) > self._limit
        super().handle_events()

    def _should_upgrade(self) -> bool:
        return False  # there is no WebSocket here, and uvicorn would log how to install one

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        answer = error_response(unreadable())
        head = h11.Response(status_code=400, headers=answer.raw_headers)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.is_closing():  # its descriptor is gone
            return
        arrived = select.poll()
        arrived.register(self.transport.get_extra_info("socket"), select.POLLIN)
        if not arrived.poll(0):  # else the loop reads the request next
            super().timeout_keep_alive_handler()

    def _longest_idle(self) -> H11Protocol | None:
        others: list[Any] = [*self.connections]
        idle = [each for each in others if each.cycle is None or each.cycle.response_complete]
        return min(idle, key=lambda each: each.idle_since, default=None)


class _Listener(socket.socket):
    """A listening socket that closes at once connections that would use the last descriptors, such as endless TLS
    handshakes."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        # asyncio passes the number that it accepts at once, before any of these can make another connection yield
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        connected, address = super().accept()
        if connected.fileno() >= descriptor_limit() - RESERVED // 2:  # the system assigns the lowest free number
            connected.close()
            raise ConnectionAbortedError
        return connected, address


class WebServer(uvicorn.Server):
    """A uvicorn server that ends when `should_exit` is set, and leaves signals alone.

    It holds at most MAX_CONNECTIONS, or fewer if the limit of descriptors is lower. A further one closes the connection
    that has been without a request for longest; if all have one, it gets a 503. On a public gateway, the proxy in front
    has to refuse more silent clients.
    """

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        """Raises InputError."""
        if (room := free_descriptors()) < 1:
            raise InputError(
                f"the limit of {descriptor_limit()} open files leaves none for connections: raise it (ulimit -n)"
            )
        certificate, key = settings.tls_cert, settings.tls_key
        context = OwnCertificate(certificate, key).context if certificate and key else None
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=min(MAX_CONNECTIONS, room),
            timeout_keep_alive=settings.keep_alive_s,
            backlog=1,
            timeout_graceful_shutdown=math.ceil(settings.drain_s),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ssl_context_factory=None if context is None else lambda config, default: context,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because uvicorn would raise each signal again after it ends."""
        yield


def open_socket(listen: str) -> socket.socket:
    """A listening socket. Raises ServiceError."""
    host, port = parse_address(listen, "listen address")
    with file_errors(ServiceError, f"cannot listen on {listen}", "give another --listen, or stop what listens there"):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _Listener(fileno=socket.create_server((host, port), family=family, backlog=BACKLOG).detach())


def _read(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context with these files. Raises InputError."""
    from cryptography import x509

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # for TLS 1.2: only AEAD ciphers
    context.set_alpn_protocols(["http/1.1"])
    what = f"cannot use --tls-cert {certificate} with --tls-key {key}"
    with file_errors(InputError, what, "give PEM files of one certificate and its unlocked key"):
        # without a passphrase callback, a locked key would prompt on the terminal
        context.load_cert_chain(certificate, key, password=lambda: "")
        check_secret(key)
        with suppress(ValueError, x509.InvalidVersion):  # only OpenSSL reads it
            if x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc < datetime.now(UTC):
                raise InputError(f"{certificate} has expired: renew it")
    return context
