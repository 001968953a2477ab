"""The gateway: an ASGI application in front of one router, and the process that serves it.

It is no part of the router: it needs no weights, can run on another machine or several times, and web traffic cannot
slow the router's event loop.
"""

import asyncio
import logging
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as FrameworkError

from serving.client.client import AsyncClient
from serving.gateway.errors import OF_ALL, api_error_of, error_response
from serving.gateway.middleware import HTTP_METRICS, RequestBounds, RequestLog
from serving.gateway.openai import routes as openai_routes
from serving.gateway.openai import token_routes
from serving.gateway.pages import host_routes, page_routes, race_routes
from serving.gateway.settings import HttpSettings
from stages.errors import OnesweepError
from stages.signals import run_until_signal
from stages.telemetry.observability import Telemetry
from stages.wire.web_access import host_name
from stages.wire.web_server import WebServer, open_socket

log = logging.getLogger(__name__)

_ABOUT = """OpenAI-compatible completions over a ring of far-apart hosts. A byte model's tokens are bytes. Requests may
have an object `onesweep` with settings of ours; answers have `onesweep.accounting`: what the text cost."""


def make_app(settings: HttpSettings, client: AsyncClient) -> RequestLog:
    """An app that talks to one router."""
    # no docs_url, no redoc_url: those pages load scripts from other servers
    app = FastAPI(title="onesweep", description=_ABOUT, docs_url=None, redoc_url=None, responses=OF_ALL)
    app.version = version("onesweep")
    app.state.client, app.state.settings = client, settings
    for routes in (openai_routes, token_routes, race_routes, host_routes, page_routes()):
        app.include_router(routes)
    names = {host_name(settings.listen), *settings.allow_hosts} - {None}
    for kind in (RequestValidationError, FrameworkError, OnesweepError, Exception):
        app.add_exception_handler(kind, _answer)
    return RequestLog(RequestBounds(app, frozenset(name.lower() for name in names if name)))


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(api_error_of(error))


async def run_gateway(settings: HttpSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set and running answers have ended. Raises OnesweepError."""
    lookout = Telemetry(settings.seeing, settings.insecure)
    client = AsyncClient(settings.router, tls=settings.router_tls, token="", insecure=settings.insecure)
    app = make_app(settings, client)
    server = WebServer(
        app, settings.tls_cert, settings.tls_key, drain_s=settings.drain_s, keep_alive_s=settings.keep_alive_s
    )
    with open_socket(settings.listen) as listener:
        if settings.seeing.metrics is not None:
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


def serve(settings: HttpSettings) -> None:
    """Run a gateway to its end. Raises OnesweepError."""
    run_until_signal(partial(run_gateway, settings))
