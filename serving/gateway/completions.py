"""Completions: a request's settings for the router, its choices as they arrive, and OpenAI's answer objects."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from serving.client.client import Result, RouterError, TextDecoder
from serving.client.result import PromptLogprobs
from serving.gateway.access import RouterAccess
from serving.gateway.errors import ApiError
from serving.gateway.fields import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    PlainFormat,
    TextRequest,
)
from serving.gateway.messages import CallReader, ToolCall, request_messages
from serving.modes import AUTO, SCORING
from serving.router.request import SETTINGS
from serving.v1 import router_pb2
from stages.host.schema_check import held_part
from stages.limits import MAX_SEED


def costs_of(result: Result) -> dict[str, Any]:
    """A text's account, for `onesweep.accounting` in the answer."""
    record = result.as_json()
    del record["text"]
    return {**record, "host_seconds": result.host_seconds}


def drawn_seed(seed: int | None) -> int:
    """The seed of a request, random if it names none."""
    # below 2^53, for JSON readers that use doubles
    return secrets.randbelow(1 << 53) if seed in (None, -1) else seed


@dataclass(frozen=True)
class CompletionOrder:
    """Requests to the router for the choices of one answer, prompt by prompt."""

    # For each prompt: the text to put before its choices, and the request to the router.
    prompts: tuple[tuple[str, dict[str, Any]], ...]
    # Seeds of each prompt's choices.
    seeds: tuple[int, ...]
    # False: the answer omits the generated text or its logprobs.
    writes: bool = True
    logprobs: bool = True
    # Parts of the request's JSON schemas that are not enforced.
    unenforced: tuple[str, ...] = ()
    # Names of the tools that a choice may call, and the most calls; None for any number.
    tools: tuple[str, ...] = ()
    max_calls: int | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * len(self.seeds)


def order_of(request: TextRequest, mode: str, format_field: str) -> CompletionOrder:
    """:param format_field: the API's field for the text's format.

    Raises ApiError.
    """
    chat = request if isinstance(request, ChatRequest) else None
    own = vars(request) | request.onesweep.model_dump(exclude_none=True)  # some of ours may stand beside `onesweep`
    newer, messages = (chat.max_completion_tokens, chat.messages) if chat else (None, [])
    json_schema, unenforced = _json_schema(chat, format_field) if chat else ("", [])
    offered = chat.offered if chat else []
    # in the form that chat templates expect; in a response the tool itself has the type
    functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in offered]
    tools = [{"type": "function", "function": function} for function in functions]
    logprobs = (chat.top_logprobs or 0) if chat and chat.logprobs else None
    if isinstance(request, CompletionRequest):
        logprobs = request.logprobs
    scores = isinstance(request, CompletionRequest) and request.scores_prompt
    most = newer or request.max_tokens
    seed = drawn_seed(request.seed)
    settings: dict[str, Any] = {
        **{f.name: own[f.name] for f in SETTINGS if f.name in own and f.name != "seed"},
        "prompt": "",
        "mode": SCORING if scores and mode == AUTO else mode,
        "score_prompt": scores,
        # the hosts generate one token after each prompt that they score
        "max_tokens": DEFAULT_MAX_TOKENS if most is None else max(most, 1),
        "fits_context": most is None,
        "logit_bias": {int(token): bias for token, bias in (request.logit_bias or {}).items()},
        "logprobs": (logprobs or 0) if scores else logprobs,
        "json_schema": json_schema,
        "stops": request.stop or (),
        "messages": request_messages(messages),
        "tools": json.dumps(tools) if tools else "",
        "must_call": chat.must_call if chat else (),
        "continue_last": chat is not None and chat.continues,
        "timeout_s": own.get("timeout_s"),
    }
    seeds = tuple((seed + index) % (MAX_SEED + 1) for index in range(request.n or 1))
    max_calls = 1 if chat and chat.parallel_tool_calls is False else None
    prompts = [("", settings)]
    if isinstance(request, CompletionRequest):
        texts: list[Any] = request.prompt  # a single prompt of tokens is in a list by now
        asked = [settings | {"prompt" if isinstance(each, str) else "prompt_tokens": each} for each in texts]
        prompts = [*zip(texts if request.echo and not scores else [""] * len(texts), asked, strict=True)]
    reported = most != 0, not scores or logprobs is not None
    names = tuple(tool.name for tool in offered)
    return CompletionOrder(tuple(prompts), seeds, *reported, tuple(unenforced), names, max_calls)


def _json_schema(chat: ChatRequest, format_field: str) -> tuple[str, list[str]]:
    """The JSON schema that the text must follow, empty for any text, and the parts that are not enforced for text or
    calls. Raises ApiError for a part of a strict schema that cannot be enforced."""
    text, unenforced = "", list[str]()
    # a text that must be a call has no other format
    match None if chat.must_call else chat.response_format:
        case JsonSchemaFormat(json_schema=named):
            schema, unenforced = held_part(named.schema_)
            text = json.dumps(schema)
            _check_held(unenforced, named.strict, format_field)
        case PlainFormat(type="json_object", schema_=given):
            schema, unenforced = held_part({"type": "object"} if given is None else given)
            text = json.dumps(schema)
        case PlainFormat(schema_=dict()):
            raise ApiError(400, f"{format_field}: type text takes no schema: give type json_object", param=format_field)
    for tool in chat.offered:
        if tool.strict or tool.name in chat.must_call:
            _check_held(tool.unenforced, tool.strict, "tools")
            unenforced += tool.unenforced
    return text, unenforced


def _check_held(unenforced: Sequence[str], strict: bool | None, field: str) -> None:
    if strict and unenforced:
        what = f"{field}: {', '.join(unenforced)} in a schema cannot be enforced: leave it out, or leave out strict"
        raise ApiError(400, what, param=field)


@dataclass(frozen=True)
class ChoiceText:
    """A piece of a choice's text, the logprobs of its tokens if requested, and tool calls."""

    index: int
    text: str
    logprobs: Sequence[router_pb2.TokenLogprob] = ()
    calls: Sequence[ToolCall] = ()

    def __add__(self, later: ChoiceText) -> ChoiceText:
        logprobs, calls = [*self.logprobs, *later.logprobs], [*self.calls, *later.calls]
        return ChoiceText(self.index, self.text + later.text, logprobs, calls)


@dataclass(frozen=True)
class ChoiceEnd:
    index: int
    result: Result
    called: bool = False

    @property
    def reason(self) -> str:
        return "tool_calls" if self.called else "stop" if self.result.stopped else "length"


Choice = AsyncGenerator[ChoiceText | ChoiceEnd, None]


async def run_choice(
    router: RouterAccess, order: CompletionOrder, index: int, named: Callable[[str], object], whole: bool
) -> Choice:
    """Yield the texts of one choice, then its end.

    :param named: called first with the router's name for the request.
    :param whole: send the text in one piece.
    Raises OnesweepError.
    """
    decoder, result, logprobs = TextDecoder(), None, list[router_pb2.TokenLogprob]()
    reader, calls = CallReader(order.tools, order.max_calls) if order.tools else None, list[ToolCall]()
    echo, settings = order.prompts[index // len(order.seeds)]
    seed = order.seeds[index % len(order.seeds)]
    events = router.events(**settings, seed=seed, whole=whole, named=named)
    async with aclosing(events):
        async for event in events:
            if echo:
                yield ChoiceText(index, echo)
                echo = ""
            if isinstance(event, Result):
                result = event
            elif isinstance(event, PromptLogprobs):
                text = b"".join(each.text for each in event).decode(errors="replace")
                yield ChoiceText(index, text, event if order.logprobs else ())
            elif not order.writes:
                continue
            elif isinstance(event, list):
                logprobs = event if order.logprobs else []
            elif isinstance(event, bytes):
                text = decoder.feed(event)
                if (text := reader.feed(text) if reader else text) or logprobs:
                    yield ChoiceText(index, text, logprobs)
                    logprobs = []
    if result is None:
        raise RouterError("the router closed the stream without a summary", grpc.StatusCode.INTERNAL)
    text = decoder.end()
    if reader:
        text = reader.feed(text)
        rest, calls = reader.end()
        text += rest
    if text or logprobs or calls:
        yield ChoiceText(index, text, logprobs, calls)
    yield ChoiceEnd(index, result, bool(calls))


async def whole_choices(items: Choice, count: int) -> tuple[list[ChoiceText], list[ChoiceEnd]]:
    """Collect the text and end of each choice, by index. Raises OnesweepError."""
    texts, ends = [ChoiceText(index, "") for index in range(count)], dict[int, ChoiceEnd]()
    async with aclosing(items):
        async for item in items:
            if isinstance(item, ChoiceText):
                texts[item.index] += item
            else:
                ends[item.index] = item
    return texts, [ends[index] for index in range(count)]


# OpenAI's objects of completions and chats, whole and in chunks.


class AnswerFormat:
    """The objects of one answer, which share id, time and model."""

    def __init__(self, request: TextRequest, order: CompletionOrder) -> None:
        self.model, self.chat, self.created = request.model, isinstance(request, ChatRequest), int(time.time())
        self.order = order
        # characters of each choice so far, decoded from its tokens
        self._lengths, self._decoders = Counter[int](), defaultdict[int, TextDecoder](TextDecoder)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    def chunk(self, choices: Sequence[dict[str, Any]], **more: object) -> dict[str, Any]:
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices, more)

    def opening_chunk(self, index: int, **more: object) -> dict[str, Any]:
        """The first chunk of a choice in a chat."""
        return self.chunk([_choice(index, None, delta={"role": "assistant", "content": ""})], **more)

    def chunk_of(self, item: ChoiceText | ChoiceEnd, **more: object) -> dict[str, Any]:
        if isinstance(item, ChoiceText):
            return self.chunk([self._choice(item, None)], **more)
        last = self._choice(ChoiceText(item.index, ""), item.reason)
        return self.chunk([last], onesweep=own_part([item], self.order), **more)

    def whole(self, texts: Sequence[ChoiceText], ends: Sequence[ChoiceEnd]) -> dict[str, Any]:
        choices = [self._choice(text, end.reason, whole=True) for text, end in zip(texts, ends, strict=True)]
        more = {"usage": usage(ends, self.order), "onesweep": own_part(ends, self.order)}
        return self._object("chat.completion" if self.chat else "text_completion", choices, more)

    def _choice(self, piece: ChoiceText, reason: str | None, whole: bool = False) -> dict[str, Any]:
        logprobs = self._logprobs(piece.index, piece.logprobs)
        if not self.chat:
            return _choice(piece.index, reason, logprobs, text=piece.text)
        calls = [call.as_json() for call in piece.calls]
        if whole:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            called = {"content": piece.text or None, "tool_calls": calls} if calls else {}
            return _choice(piece.index, reason, logprobs, message=message | called)
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        return _choice(piece.index, reason, logprobs, delta=delta)

    def _logprobs(self, index: int, logprobs: Sequence[router_pb2.TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        if self.chat:
            tokens = [{**_token(each), "top_logprobs": [_token(top) for top in each.top]} for each in logprobs]
            return {"content": tokens, "refusal": None}
        offsets = list[int]()
        for each in logprobs:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(self._decoders[index].feed(each.text))  # a token may split a character
        return {
            "tokens": [_shown(each) for each in logprobs],
            "token_logprobs": [None if math.isnan(each.logprob) else each.logprob for each in logprobs],
            "top_logprobs": [
                None if math.isnan(each.logprob) else {_shown(top): top.logprob for top in (each, *each.top)}
                for each in logprobs
            ],
            "text_offset": offsets,
        }

    def _object(self, name: str, choices: Sequence[dict[str, Any]], more: Mapping[str, object]) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}


def _choice(
    index: int, reason: str | None, logprobs: dict[str, Any] | None = None, **content: object
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _token(token: router_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": _shown(token), "logprob": token.logprob, "bytes": list(token.text)}


def _shown(token: router_pb2.TokenLogprob) -> str:
    """A token's text; for a token that splits a character its bytes, in the notation of OpenAI's API."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)


def own_part(ends: Sequence[ChoiceEnd], order: CompletionOrder) -> dict[str, Any]:
    """The `onesweep` object of an answer."""
    extra = {"unenforced": [*order.unenforced]} if order.unenforced else {}
    return {"accounting": [{"index": end.index, **costs_of(end.result)} for end in ends], **extra}


def usage(ends: Sequence[ChoiceEnd], order: CompletionOrder) -> dict[str, Any]:
    """Counts of the model's tokens. A prompt counts once for all its choices.

    :param ends: by index.
    """
    firsts = [end.result for end in ends[:: len(order.seeds)]]
    prompt, output = sum(first.prompt_tokens for first in firsts), sum(end.result.output_tokens for end in ends)
    output *= order.writes
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached_tokens for first in firsts)},
    }
