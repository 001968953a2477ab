"""The gateway process: uvicorn with one socket."""

from __future__ import annotations

import asyncio
import logging

from serving.client import AsyncClient
from serving.http.app import make_app
from serving.http.settings import HttpSettings
from serving.http.visits import HTTP_METRICS, HttpFigures
from stages.lookout import Lookout
from stages.transport import stop_on_signals
from stages.web.server import WebServer, open_socket

log = logging.getLogger(__name__)


async def run_gateway(settings: HttpSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; answers under way end first. Raises OnesweepError."""
    lookout = Lookout(settings.seeing, "onesweep-http", "http", settings.insecure)
    client = AsyncClient(settings.router, tls=settings.router_tls, insecure=settings.insecure)
    figures = HttpFigures()
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
