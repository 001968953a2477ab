"""The ASGI application: routes, what stands before them, and how they fail."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as FrameworkError
from starlette.types import ASGIApp

from serving.client import AsyncClient
from serving.http import hosts, openai_api, race
from serving.http.errors import ApiError, api_error_of, error_response, invalid_fields, plain_error
from serving.http.guard import Guard
from serving.http.pages import page_routes
from serving.http.reception import Reception
from serving.http.settings import HttpSettings
from serving.http.visits import HttpFigures, Visits
from stages.errors import OnesweepError
from stages.web.caller import host_name

_ABOUT = """OpenAI-compatible completions over a ring of far-apart hosts. A byte model's tokens are bytes. Requests may
have an object `onesweep` with settings of ours; answers have `onesweep.accounting`: what the text cost."""


def make_app(settings: HttpSettings, client: AsyncClient, figures: HttpFigures) -> ASGIApp:
    """An app that talks to one router."""
    # the framework's own pages for the schema load scripts from other servers
    app = FastAPI(
        title="onesweep",
        version=version("onesweep"),
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
    )
    app.state.client, app.state.settings = client, settings
    for routes in (openai_api.routes, race.routes, hosts.routes, page_routes()):
        app.include_router(routes)
    names = {host_name(settings.listen), *settings.allow_hosts} - {None}
    app.add_exception_handler(RequestValidationError, _wrong_fields)
    app.add_exception_handler(FrameworkError, _framework_error)
    app.add_exception_handler(OnesweepError, _our_error)
    app.add_exception_handler(Exception, _our_error)
    return Visits(Reception(app, Guard(frozenset(name.lower() for name in names if name))), figures)


async def _wrong_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_fields(error.errors()))


async def _framework_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error_response(error)
    assert isinstance(error, FrameworkError)
    return error_response(plain_error(error))


async def _our_error(request: Request, error: Exception) -> Response:
    return error_response(api_error_of(error))
