"""/v1: the part of OpenAI's API that our models can serve. Each text mode is a model; `onesweep` chooses one."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, create_model

from serving.gateway.access import Router, RouterAccess, StrictRoute
from serving.gateway.completions import (
    AnswerFormat,
    Choice,
    ChoiceEnd,
    CompletionOrder,
    drawn_seed,
    order_of,
    run_choice,
    usage,
    whole_choices,
)
from serving.gateway.errors import ROUTER_ERRORS, ApiError, json_response, named
from serving.gateway.fields import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ImageRequest,
    TextRequest,
    TokenizeRequest,
)
from serving.gateway.responses import ResponseFormat, ResponseRequest
from serving.gateway.streams import DONE, event_stream, merged, sse
from serving.modes import AUTO, MODES
from serving.v1 import router_pb2
from stages.errors import quoted
from stages.v1 import stage_pb2

# A mode is a model: every tool for OpenAI's API can choose a model, but few can set our own fields.
MODEL = "onesweep"


async def mode_of(router: RouterAccess, model: str, asked: str | None = None) -> str:
    """The mode that a request names. Raises OnesweepError or ApiError.

    :param asked: the request's own field `onesweep.mode`.
    """
    named = model.removeprefix(f"{MODEL}-") if model != MODEL else None
    if named is not None and (named == model or named not in MODES):
        served = ", ".join(entry["id"] for entry in catalogue(await router.status(), _STARTED))
        raise _no_model(model, f"; served here: {served or 'none yet'}")
    if named and asked and named != asked:
        raise ApiError(
            400,
            f"the model is {model}, but onesweep.mode is {quoted(asked)}: name the mode in only one of them",
            param="onesweep.mode",
        )
    return named or asked or AUTO


def _no_model(model: str, remedy: str) -> ApiError:
    return ApiError(404, f"no model {quoted(model)}{remedy}", param="model", code="model_not_found")


def catalogue(status: router_pb2.StatusResponse, created: int) -> list[dict[str, Any]]:
    """The entries of /v1/models: `onesweep`, then a model for each served text mode."""
    own: dict[str, dict[str, Any]] = {MODEL: {"mode": AUTO}} if status.modes else {}
    own |= {f"{MODEL}-{mode}": {"mode": mode} for mode in status.modes}
    own = {name: {**about, "context_tokens": status.context_tokens} for name, about in own.items()}
    if status.HasField("pictures"):
        own[MODEL] = {"draws": list(status.pictures.classes), "size": _size(status.pictures)}
    return [
        {"id": name, "object": "model", "created": created, "owned_by": "onesweep", "onesweep": about}
        for name, about in own.items()
    ]


def _size(pictures: stage_pb2.PictureInfo) -> str:
    return f"{pictures.width}x{pictures.height}"


routes = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI"], responses=ROUTER_ERRORS)
token_routes = APIRouter(route_class=StrictRoute, tags=["tokens"], responses=ROUTER_ERRORS)
_STARTED = int(time.time())
# The answers' objects in the OpenAPI schema.
_Made = create_model("Made", id=str, object=str, model=str, usage=dict[str, Any], onesweep=dict[str, Any])
_Completion = create_model("Completion", __base__=_Made, created=int, choices=list[dict[str, Any]])
_Response = create_model("Response", __base__=_Made, created_at=int, status=str, output=list[dict[str, Any]])
_Tokens = create_model("Tokens", tokens=list[int], count=int, max_model_len=int)
_Text = create_model("Text", prompt=str, content=str)
_Model = create_model("Model", id=str, object=str, created=int, owned_by=str, onesweep=dict[str, Any])
_Models = create_model("Models", object=str, data=list[_Model])  # type: ignore[valid-type]
_Images = create_model("Images", created=int, data=list[dict[str, str]], size=str, onesweep=dict[str, Any])


def _streamed(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    about = "The answer, or its chunks as they come"
    return {200: {"model": model, "content": {"text/event-stream": {}}, "description": about}}


@routes.post("/completions", response_class=Response, responses=_streamed(_Completion))
async def completions(request: CompletionRequest, router: Router) -> Response:
    """Continue a prompt."""
    return await _answer(router, request)


@routes.post("/chat/completions", response_class=Response, responses=_streamed(_Completion))
async def chat_completions(request: ChatRequest, router: Router) -> Response:
    """Continue the messages in the model's chat template; a byte model continues their texts, one line each."""
    return await _answer(router, request)


@routes.post("/responses", response_class=Response, responses=_streamed(_Response))
async def responses(request: ResponseRequest, router: Router) -> Response:
    """Answer a text or a conversation: a chat in OpenAI's newer form, of which nothing is stored."""
    order, names = await _order(router, request.chat(), "text.format"), list[str]()
    shape = ResponseFormat(request, order)
    choice = run_choice(router, order, 0, names.append, whole=not request.stream)
    if request.stream:
        return await event_stream(shape.events(choice), names)
    return json_response(await shape.whole(choice), headers=named(names))


@token_routes.post("/tokenize", response_class=Response, responses={200: {"model": _Tokens}})
async def tokenize(request: TokenizeRequest, router: Router) -> Response:
    """The tokens of a text."""
    if not (text := request.prompt.encode()):
        raise ApiError(400, "the prompt is empty: give some text", param="prompt")
    piece = not request.add_special_tokens
    answer = await router.tokenize(await mode_of(router, request.model), text=text, piece=piece)
    tokens = list(answer.tokens)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": answer.context_tokens})


@token_routes.post("/detokenize", response_class=Response, responses={200: {"model": _Text}})
async def detokenize(request: DetokenizeRequest, router: Router) -> Response:
    """The text of tokens, under the names that vLLM and llama.cpp have for it."""
    answer = await router.tokenize(await mode_of(router, request.model), tokens=request.tokens)
    text = answer.text.decode(errors="replace")
    return json_response({"prompt": text, "content": text})


@routes.get("/models", response_class=Response, responses={200: {"model": _Models}})
async def models(router: Router) -> Response:
    """A model for each served mode, and `onesweep`, which chooses the best of them."""
    return json_response({"object": "list", "data": catalogue(await router.status(), _STARTED)})


@routes.get("/models/{model}", response_class=Response, responses={200: {"model": _Model}})
async def one_model(model: str, router: Router) -> Response:
    status = await router.status()
    for entry in catalogue(status, _STARTED):
        if entry["id"] == model:
            return json_response(entry)
    raise _no_model(model, " is served; GET /v1/models lists them")


@routes.post("/images/generations", response_class=Response, responses={200: {"model": _Images}})
async def images(request: ImageRequest, router: Router) -> Response:
    """Draw pictures of a class, each as a PNG in base64."""
    if request.model not in (None, MODEL):
        raise _no_model(request.model, f" draws: choose {MODEL}")
    shown = (await router.status()).pictures
    if not shown.classes:
        raise ApiError(400, "no model here draws: the router serves one that writes text", param="prompt")
    size = _size(shown)
    if request.size not in (None, "auto", size):
        raise ApiError(400, f"size {request.size} cannot be drawn: this model draws {size}", param="size")
    own = {name: value for name, value in request.onesweep.model_dump().items() if value is not None}
    seed = drawn_seed(request.seed)
    drawn = await router.draw(request.prompt, pictures=request.n or 1, seed=seed, **own)
    data = [{"b64_json": base64.b64encode(drawn.png(index)).decode()} for index in range(len(drawn))]
    answer = {"created": int(time.time()), "data": data, "size": size, "output_format": "png"}
    return json_response({**answer, "onesweep": {"accounting": drawn.as_json()}}, headers=named([drawn.request]))


async def _order(router: RouterAccess, request: TextRequest, format_field: str = "response_format") -> CompletionOrder:
    """:param format_field: the API's field for the text's format. Raises ApiError."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if request.best_of not in (None, n := request.n or 1):
        raise ApiError(400, f"best_of must be {n}, as n, not {request.best_of}: ask for n choices", param="best_of")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if isinstance(request, ChatRequest):
        _check_tools(request)
    if request.max_tokens == 0 and isinstance(request, CompletionRequest) and not request.echo:
        message = "max_tokens 0 is for echo, which returns the prompt: send echo: true, or more tokens"
        raise ApiError(400, message, param="max_tokens")
    return order_of(request, await mode_of(router, request.model, request.onesweep.mode), format_field)


def _check_tools(request: ChatRequest) -> None:
    """Raise ApiError for tools or a tool choice that cannot be enforced."""
    names, must = [tool.name for tool in request.offered], request.must_call
    if len({*names}) < len(names):
        raise ApiError(400, "two tools have the same name", param="tools")
    if request.tool_choice not in (None, "none", "auto") and not names:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if not {*must} <= {*names}:
        raise ApiError(400, f"tool_choice names {quoted(must[0])}, which is not among the tools", param="tool_choice")


async def _answer(router: RouterAccess, request: TextRequest) -> Response:
    order, names = await _order(router, request), list[str]()
    shape, choices = AnswerFormat(request, order), _choices(router, order, names, whole=not request.stream)
    if request.stream:
        with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        return await event_stream(_chunks(choices, shape, with_usage), names)
    whole = shape.whole(*await whole_choices(choices, order.choices))
    return json_response(whole, headers=named(names))


def _choices(router: RouterAccess, order: CompletionOrder, names: list[str], whole: bool) -> Choice:
    places = asyncio.Semaphore(MAX_CHOICES)

    async def choice(index: int) -> Choice:
        async with places, aclosing(run_choice(router, order, index, names.append, whole)) as items:
            async for item in items:
                yield item

    return merged([choice(index) for index in range(order.choices)])


async def _chunks(items: Choice, shape: AnswerFormat, with_usage: bool) -> AsyncGenerator[bytes, None]:
    # with usage, every chunk has the field, null in all but the last, as OpenAI's API does
    more = {"usage": None} if with_usage else {}
    begun_choices: set[int] = set()
    ends: list[ChoiceEnd] = []
    async with aclosing(items):
        async for item in items:
            if shape.chat and item.index not in begun_choices:
                begun_choices.add(item.index)
                yield sse(shape.opening_chunk(item.index, **more))
            if isinstance(item, ChoiceEnd):
                ends.append(item)
            yield sse(shape.chunk_of(item, **more))
    if with_usage:
        ends.sort(key=lambda end: end.index)
        yield sse(shape.chunk([], usage=usage(ends, shape.order)))
    yield DONE
