"""A server of pages: uvicorn with one socket, which leaves signals to us."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from stages.errors import ServiceError
from stages.transport import parse_address
from stages.web.certificate import OwnCertificate
from stages.web.connection import Connection

BACKLOG = 512


class WebServer(uvicorn.Server):
    """Ends when `should_exit` is set."""

    def __init__(
        self,
        app: ASGIApp,
        certificate: Path | None = None,
        key: Path | None = None,
        connection: type[Connection] = Connection,
        drain_s: float = 1.0,
    ) -> None:
        """:param certificate: with its key, for HTTPS; :param drain_s: how long answers under way may go on at the end.

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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again when it has ended."""
        yield


def open_socket(listen: str) -> socket.socket:
    """A socket that listens there. Raises ServiceError."""
    host, port = parse_address(listen, "listen address")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {listen} ({error.strerror}): the port is in use, or the address is not of this machine"
        ) from None
