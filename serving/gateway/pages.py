"""The pages, their files and their API: /api/race runs one prompt in several modes; /api/hosts; health."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

from serving.client.client import RequestRefused, Result, RouterError, TextDecoder
from serving.client.result import unready_words
from serving.client.variants import all_variants, parse_variants, variant_settings
from serving.gateway.access import Router, RouterAccess, RouterClient, StrictRoute
from serving.gateway.completions import costs_of
from serving.gateway.errors import ROUTER_ERRORS, ApiError, api_error_of, json_response
from serving.gateway.fields import RaceRequest
from serving.gateway.streams import DONE, event_stream, merged, sse
from serving.modes import MODES
from serving.router.request import Request
from serving.v1 import router_pb2
from stages.errors import InputError, OnesweepError
from stages.wire.status import record_of

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


# The pages have no build step and no library: a reader can open their source, and the policy can forbid other scripts.
def page_routes() -> APIRouter:
    """Routes to the files of `static/`, read once."""
    folder, routes = files("serving.gateway").joinpath("static"), APIRouter(include_in_schema=False)
    held = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def shown(name: str) -> Response:
        # never cached: a page must match the server that it talks to
        return Response(held[name], media_type=_TYPES[name.rpartition(".")[2]], headers={"cache-control": "no-cache"})

    @routes.get("/static/{name}", response_class=Response)
    async def asset(name: str) -> Response:
        if name not in held:
            raise ApiError(404, "no such file")
        return shown(name)

    for path, page in (("/", "race.html"), ("/race", "race.html"), ("/chat", "chat.html"), ("/hosts", "hosts.html")):
        routes.add_api_route(path, partial(shown, page), response_class=Response)
    return routes


race_routes = APIRouter(route_class=StrictRoute, tags=["pages"], responses=ROUTER_ERRORS)

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, each with its `lane`"}
}


@race_routes.post("/api/race", response_class=Response, responses=_STREAM)
async def race(request: RaceRequest, router: Router) -> Response:
    """Events with a `lane` and one of: `started`, `trip`, `text`, `result`, `error`; then [DONE]."""
    asked = request.model_dump(include={"prompt", "max_bytes", "seed", "temperature", "budget_ms"})
    try:
        entrants = parse_variants(",".join(request.entrants), MODES, "entrants")
        for entrant in entrants:
            Request(**variant_settings(entrant, asked)).message()
    except InputError as error:
        raise ApiError(400, str(error), param="entrants") from None
    lanes = [_lane(router, entrant.label, variant_settings(entrant, asked)) for entrant in entrants]
    return await event_stream(_events(lanes, request.together))


async def _events(lanes: Sequence[AsyncGenerator[dict[str, Any], None]], together: bool) -> AsyncGenerator[bytes, None]:
    for lanes_at_once in [lanes] if together else [[lane] for lane in lanes]:
        async with aclosing(merged(lanes_at_once)) as items:
            async for item in items:
                yield sse(item)
    yield DONE


async def _lane(router: RouterAccess, lane: str, asked: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of one entrant. Its error does not end other lanes."""
    decoder = TextDecoder()
    yield {"lane": lane, "started": True}
    events = router.events(**asked, trips=True)
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, router_pb2.Trip):
                    yield {"lane": lane, "trip": record_of(event)}
                elif isinstance(event, Result):
                    text = decoder.end()
                    yield {"lane": lane, "text": text, "result": costs_of(event)}
                elif isinstance(event, bytes) and (text := decoder.feed(event)):
                    yield {"lane": lane, "text": text}
    except OnesweepError as error:
        yield {"lane": lane, "error": str(error), "status": api_error_of(error).status_code}


READY_TIMEOUT_S = 2.0

host_routes = APIRouter()
_HOSTS, _STATE = {"model": dict[str, Any]}, {"model": dict[str, str]}


@host_routes.get("/api/hosts", response_class=Response, tags=["pages"], responses=ROUTER_ERRORS | {200: _HOSTS})
async def hosts(router: Router) -> Response:
    """The router's Status, with the entrants that a race may have."""
    status = await router.status()
    labels = [entrant.label for entrant in all_variants(status, scorer=None)]
    return json_response(record_of(status) | {"entrants": labels})


@host_routes.get("/healthz", response_class=Response, tags=["health"], responses={200: _STATE})
async def healthz() -> Response:
    """This process lives."""
    return json_response({"status": "live"})


@host_routes.get("/readyz", response_class=Response, tags=["health"], responses={200: _STATE, 503: _STATE})
async def readyz(client: RouterClient) -> Response:
    """200 when the router can serve; else 503 with the reason."""
    try:
        if await client.serves(READY_TIMEOUT_S):
            return json_response({"status": "ready"})
        why = unready_words(await client.status(READY_TIMEOUT_S))
    except (RequestRefused, RouterError) as error:  # without a token the router says no more
        why = "" if isinstance(error, RequestRefused) else str(error)
    return json_response({"status": "not ready", "reason": why or "the hosts are not ready"}, 503)
