"""A server of pages: uvicorn on one socket, with limits for each connection and a certificate that can be renewed."""

import asyncio
import logging
import math
import select
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from onesweep.stages.errors import InputError, ServiceError
from onesweep.stages.wire.channel import parse_address
from onesweep.stages.wire.secret_files import check_secret, stamp_of
from onesweep.stages.wire.tls import Stamp

log = logging.getLogger(__name__)

# Time for a TLS handshake; asyncio's own is a minute.
HANDSHAKE_S = 10.0
# Time for the head of a request, from the first byte to the last: uvicorn sets no limit. Each app limits its bodies.
HEAD_S = 10.0
# Time for the peer to read what was sent.
UNREAD_S = 60.0
BACKLOG = 512
HTTP_2 = b"PRI * HTTP/2."  # how a connection begins that speaks HTTP/2 without asking


class Connection(H11Protocol):
    """An HTTP connection that ends if a request's head does not arrive in time, or if its answer is not read.

    It overrides uvicorn's protocol: uvicorn's own time-outs cover neither, so 1,000 silent peers would take all places.
    """

    max_connections = 1000  # for another one that which has asked nothing for longest is closed, or else the new one

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, mute: dict["Connection", None], **given: Any) -> None:  # noqa: ANN401 - uvicorn's own
        """:param mute: the server's connections before their first request, the oldest first."""
        super().__init__(**given)
        self.mute = mute

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            oldest = next((each for each in self.mute if not each.has_unread), self)
            oldest.transport.abort()
            self.mute.pop(oldest, None)
            if oldest is self:
                return
        self.mute[self] = None
        transport.set_write_buffer_limits(high=1, low=0)  # the last bytes of an answer count as unread, too
        self._watch()

    def data_received(self, data: bytes) -> None:
        if data.startswith(HTTP_2):  # to h11 a request like others: it would be asked of the app, and logged twice
            self.transport.write(b"HTTP/1.1 505 HTTP Version Not Supported\r\nConnection: close\r\n\r\n")
            self.transport.close()
            return
        super().data_received(data)
        if self.cycle is not None:
            self.mute.pop(self, None)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.mute.pop(self, None)
        self._forget()
        self._see_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._see_read()

    @property
    def has_unread(self) -> bool:
        """True if the kernel has bytes of it: after a stall, hundreds of connections are made before one is read."""
        poll, connected = select.poll(), self.transport.get_extra_info("socket")
        if is_open := connected is not None and connected.fileno() >= 0:  # with TLS it is closed before we are told
            poll.register(connected, select.POLLIN)
        return is_open and bool(poll.poll(0))

    @property
    def _waits(self) -> bool:
        """True while a head is due, or the rest of a body whose request was answered without it."""
        # a body that a handler still reads is not limited here, however slowly it comes
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self) -> None:
        if not self._waits:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._end)

    def _end(self) -> None:
        self._late = None
        if self._waits:
            self.transport.abort()

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _see_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class OwnCertificate:
    """A server's certificate for browsers, looked up for every handshake, so that a renewed one needs no restart."""

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
            except InputError as error:  # maybe only one of the files is replaced so far: the next change is read again
                log.warning("new certificate not taken: %s", error)
        connection.context = self._newest


class WebServer(uvicorn.Server):
    """A uvicorn server that ends when `should_exit` is set, and leaves signals alone."""

    def __init__(
        self,
        app: ASGIApp,
        certificate: Path | None = None,
        key: Path | None = None,
        connection: type[Connection] = Connection,
        drain_s: float = 1.0,
    ) -> None:
        """:param certificate: with its key, for HTTPS.
        :param drain_s: time for running answers to end at the end.

        Raises InputError.
        """
        context = OwnCertificate(certificate, key).context if certificate and key else None
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(drain_s),
            ssl_context_factory=None if context is None else lambda config, default: context,
        )
        super().__init__(config)
        self._connection = connection

    async def startup(self, sockets: Sequence[socket.socket]) -> None:  # type: ignore[override]
        """As uvicorn's for open sockets, with a limit for handshakes, which it does not offer."""
        made = partial(self._connection, {}, config=self.config, server_state=self.server_state, app_state={})
        start, tls = asyncio.get_running_loop().create_server, self.config.ssl
        limit_s = HANDSHAKE_S if tls else None
        self.servers = [
            await start(made, sock=each, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=limit_s) for each in sockets
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would raise each signal again after its own end."""
        yield


def open_socket(listen: str) -> socket.socket:
    """A listening socket. Raises ServiceError."""
    host, port = parse_address(listen, "listen address")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {listen} ({error.strerror}): the port is in use, or the address is not of this machine"
        ) from None


def _read(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context with these files. Raises InputError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # of TLS 1.2: none that encrypts and authenticates in two steps
    context.set_alpn_protocols(["http/1.1"])
    try:
        # without a passphrase callback a locked key would ask on the terminal
        context.load_cert_chain(certificate, key, password=lambda: "")
        check_secret(key)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise InputError(
            f"cannot use --tls-cert {certificate} with --tls-key {key} "
            f"({getattr(error, 'strerror', None) or error}): give PEM files of one certificate and its unlocked key"
        ) from None
    return context
