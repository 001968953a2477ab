"""/v1: the part of OpenAI's API that a model which goes on with a text can do."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response

from serving.client import AsyncClient
from serving.http.access import Authorization, RouterClient, Settings, StrictRoute
from serving.http.catalogue import catalogue, mode_of
from serving.http.choice import End, Piece, run_choice
from serving.http.errors import ApiError, json_response, named
from serving.http.fields import ChatRequest, CompletionRequest, TextRequest
from serving.http.merging import merged
from serving.http.order import Order, order_of, suffix_of
from serving.http.shapes import ChatShape, CompletionShape, Shape, usage
from serving.http.sse import DONE, EventStream, sse

routes = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI"])
_STARTED = int(time.time())
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or its chunks as they come"}
}


@routes.post("/completions", response_class=Response, responses=_STREAM)
async def completions(
    request: CompletionRequest, client: RouterClient, settings: Settings, authorization: Authorization
) -> Response:
    """Goes on with a prompt, or writes what stands before `suffix`."""
    order = await _order(client, request, request.prompt, settings.timeout_s, authorization)
    return await _answer(client, order, request, CompletionShape(request.model), request.prompt if request.echo else "")


@routes.post("/chat/completions", response_class=Response, responses=_STREAM)
async def chat_completions(
    request: ChatRequest, client: RouterClient, settings: Settings, authorization: Authorization
) -> Response:
    """Goes on with the messages, as the model's chat template has them; a byte model with their texts, a line each."""
    order = await _order(client, request, "", settings.timeout_s, authorization)
    return await _answer(client, order, request, ChatShape(request.model), "")


@routes.get("/models", response_class=Response)
async def models(client: RouterClient, authorization: Authorization) -> Response:
    """One model for each mode that is served, and `onesweep`, which is the best of them to begin with."""
    status = await client.status(authorization=authorization)
    return json_response({"object": "list", "data": catalogue(status.modes, status.context_tokens, _STARTED)})


@routes.get("/models/{model}", response_class=Response)
async def one_model(model: str, client: RouterClient, authorization: Authorization) -> Response:
    status = await client.status(authorization=authorization)
    for entry in catalogue(status.modes, status.context_tokens, _STARTED):
        if entry["id"] == model:
            return json_response(entry)
    raise ApiError(
        404, f"no model {model!r} is served; GET /v1/models lists them", param="model", code="model_not_found"
    )


async def _order(
    client: AsyncClient, request: TextRequest, prompt: str, timeout_s: float, authorization: str | None
) -> Order:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    suffix = suffix_of(request)
    mode = await mode_of(client, request.model, request.onesweep.mode, suffix, authorization)
    return order_of(request, prompt, suffix, mode, timeout_s, authorization)


async def _answer(client: AsyncClient, order: Order, request: TextRequest, shape: Shape, echo: str) -> Response:
    """:param echo: stands before the text of every choice."""
    names: list[str] = []
    if request.stream:
        with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        chunks = _chunks(_choices(client, order, names, whole=False), shape, echo, with_usage)
        return EventStream(await anext(chunks), chunks, named(names))
    texts = [echo] * len(order.seeds)
    ends: dict[int, End] = {}
    async with aclosing(_choices(client, order, names, whole=True)) as items:
        async for item in items:
            if isinstance(item, Piece):
                texts[item.index] += item.text
            else:
                ends[item.index] = item
    return json_response(shape.whole(texts, [ends[index] for index in sorted(ends)]), headers=named(names))


def _choices(client: AsyncClient, order: Order, names: list[str], whole: bool) -> AsyncGenerator[Piece | End, None]:
    return merged([run_choice(client, order, index, names.append, whole) for index in range(len(order.seeds))])


async def _chunks(
    items: AsyncGenerator[Piece | End, None], shape: Shape, echo: str, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    # with usage every chunk has the field, null in all but the last: OpenAI's own rule
    more = {"usage": None} if with_usage else {}
    begun_choices: set[int] = set()
    ends: list[End] = []
    async with aclosing(items):
        async for item in items:
            if item.index not in begun_choices:
                begun_choices.add(item.index)
                if opening := shape.opening(item.index):
                    yield sse(shape.chunk([opening], **more))
                if echo:
                    yield sse(shape.piece_chunk(Piece(item.index, echo), **more))
            if isinstance(item, Piece):
                yield sse(shape.piece_chunk(item, **more))
            else:
                ends.append(item)
                yield sse(shape.end_chunk(item, **more))
    if with_usage:
        yield sse(shape.chunk([], usage=usage(ends)))
    yield DONE
