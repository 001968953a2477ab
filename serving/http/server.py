"""The gateway process: uvicorn with one socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ssl import SSLContext

import uvicorn

from serving.http.app import make_app
from serving.http.head import HeadTimed
from serving.http.settings import HttpSettings, open_socket, tls_context
from stages.transport import stop_on_signals

log = logging.getLogger(__name__)

DRAIN_S = 10
MAX_CONNECTIONS = 1000


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again when it has ended."""
        yield


async def run_gateway(settings: HttpSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; answers under way end first. Raises OnesweepError."""
    context = tls_context(settings)
    with open_socket(settings.listen) as listener:
        server = _Server(_config(settings, context))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        log.info("http: live on %s, router %s", settings.url, settings.router)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving


def _config(settings: HttpSettings, context: SSLContext | None) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(settings),
        loop="asyncio",
        http=HeadTimed,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=DRAIN_S,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


def serve(settings: HttpSettings) -> None:
    """Run a gateway to its end. Raises OnesweepError."""

    async def until_signal() -> None:
        await run_gateway(settings, stop_on_signals())

    asyncio.run(until_signal())
