"""/api/race: one prompt in several modes, told trip by trip."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response

from serving.client import AsyncClient, Result, TextDecoder
from serving.http.access import Authorization, RouterClient, Settings, StrictRoute
from serving.http.costs import costs_of
from serving.http.errors import api_error_of
from serving.http.fields import RaceRequest
from serving.http.merging import merged
from serving.http.sse import DONE, EventStream, sse
from serving.lineup import Entrant, entrant_settings, named_entrants
from serving.v1 import router_pb2
from stages.errors import OnesweepError

routes = APIRouter(route_class=StrictRoute, tags=["pages"])

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, each with its `lane`"}
}


@routes.post("/api/race", response_class=Response, responses=_STREAM)
async def race(
    request: RaceRequest, client: RouterClient, settings: Settings, authorization: Authorization
) -> Response:
    """Events with a `lane` and one of: `started`, `trip`, `text`, `result`, `error`; then [DONE]."""
    entrants = named_entrants(",".join(request.entrants))
    lanes = [_lane(client, entrant, request, settings.timeout_s, authorization) for entrant in entrants]
    events = _events(merged(lanes) if request.together else _in_turn(lanes))
    return EventStream(await anext(events), events)


async def _events(items: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(items):
        async for item in items:
            yield sse(item)
    yield DONE


async def _in_turn(lanes: Sequence[AsyncGenerator[dict[str, Any], None]]) -> AsyncGenerator[dict[str, Any], None]:
    for lane in lanes:
        async with aclosing(lane):
            async for item in lane:
                yield item


async def _lane(
    client: AsyncClient, entrant: Entrant, request: RaceRequest, timeout_s: float, authorization: str | None
) -> AsyncGenerator[dict[str, Any], None]:
    """What happens to one entrant. An error is its own affair: the others go on."""
    decoder = TextDecoder()
    asked = {
        "suffix": request.suffix,
        "max_bytes": request.max_bytes,
        "seed": request.seed,
        "temperature": request.temperature,
        "budget_ms": request.budget_ms,
    }
    yield {"lane": entrant.label, "started": True}
    events = client.events(
        request.prompt,
        timeout_s=timeout_s,
        trips=True,
        authorization=authorization,
        **entrant_settings(entrant, asked),
    )
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, router_pb2.Trip):
                    yield {"lane": entrant.label, "trip": _trip(event)}
                elif isinstance(event, Result):
                    text = decoder.end()
                    yield {"lane": entrant.label, "text": text, "result": costs_of(event)}
                elif text := decoder.feed(event):
                    yield {"lane": entrant.label, "text": text}
    except OnesweepError as error:
        yield {"lane": entrant.label, "error": str(error), "status": api_error_of(error).status_code}


def _trip(trip: router_pb2.Trip) -> dict[str, Any]:
    return {
        "number": trip.number,
        "begin_ms": round(trip.begin_ms, 3),
        "end_ms": round(trip.end_ms, 3),
        "wire_bytes": trip.wire_bytes,
        "hosts": [{"name": host.name, "compute_ms": round(host.compute_ms, 3)} for host in trip.hosts],
    }
