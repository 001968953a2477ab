"""The gateway process: uvicorn with one socket."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from serving.client import AsyncClient
from serving.http.app import make_app
from serving.http.settings import HttpSettings, open_socket
from serving.http.visits import HTTP_METRICS, HttpFigures
from stages.lookout import Lookout
from stages.transport import stop_on_signals
from stages.web.certificate import OwnCertificate
from stages.web.connection import Connection

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again when it has ended."""
        yield


async def run_gateway(settings: HttpSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; answers under way end first. Raises OnesweepError."""
    lookout = Lookout(settings.seeing, "onesweep-http", "http", settings.insecure)
    client = AsyncClient(settings.router, tls=settings.router_tls, insecure=settings.insecure)
    figures = HttpFigures()
    config = _config(settings, make_app(settings, client, figures))
    with open_socket(settings.listen) as listener:
        if settings.seeing.metrics is not None:
            lookout.serve(HTTP_METRICS, figures.read)
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        log.info("http: live on %s, router %s", settings.url, settings.router)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving
    await client.close()
    await lookout.close()


def _config(settings: HttpSettings, app: ASGIApp) -> uvicorn.Config:
    context = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        context = OwnCertificate(settings.tls_cert, settings.tls_key).context
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s),
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


def serve(settings: HttpSettings) -> None:
    """Run a gateway to its end. Raises OnesweepError."""

    async def until_signal() -> None:
        await run_gateway(settings, stop_on_signals())

    asyncio.run(until_signal())
