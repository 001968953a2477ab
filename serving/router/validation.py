"""Checks of a client's request, field by field, before any host works for it."""

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from serving.modes import LOGPROB_MODES, MODES, SCORING, SHAPED
from serving.modes.base import Generation, Mode
from serving.modes.tokenizer import BYTE_TOKENIZER, ChatPrompt, Message, Tokenizer
from serving.router.accounting import Account
from serving.router.request import (
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_TOOLS_BYTES,
    SHAPES,
    given_in,
    mode_problem,
)
from serving.v1 import router_pb2
from stages.clock import monotonic
from stages.errors import close_to, quoted
from stages.host.schema_check import CHECKS_AT_ONCE, schema_problem
from stages.limits import MAX_NESTING, nesting
from stages.model.scoring import bias_problem
from stages.threads import FairPool
from stages.wire.status import deadline_exceeded, exhausted, failed_precondition, invalid, too_long

P = ParamSpec("P")
T = TypeVar("T")
TOKENIZING_AT_ONCE = 3  # prompts
TOKEN_BYTES = 4  # bytes that a prompt token counts for


def check_mode(name: str, modes: dict[str, Mode]) -> Mode:
    """The mode called `name`. Raises StatusError."""
    if name not in modes:
        raise invalid(f"unknown mode {quoted(name)}{close_to(name, MODES)}; {_served(modes)}")
    return modes[name]


def check_served(mode: Mode, modes: Mapping[str, Mode]) -> None:
    """Raise StatusError unless the weights of `mode` are served. Meaningful once the hosts are ready."""
    if mode.problem:
        raise failed_precondition(f"mode {mode.name} cannot be served: {mode.problem}; {_served(modes)}")


def _served(modes: Mapping[str, Mode]) -> str:
    """The end of an error message about a mode."""
    served = [name for name, mode in modes.items() if not mode.problem]
    return f"served here: {', '.join(served)}" if served else "no mode is served yet: see `onesweep status`"


def check_request(request: router_pb2.GenerateRequest, mode: Mode, due_at: float) -> Generation:
    """Make a Generation for `mode` from a message, checked as far as possible without the hosts.

    Raises StatusError with a sentence that says what to change.
    """
    _check_texts(request)
    limits = [request.max_bytes] if request.max_bytes else []
    limits += [request.max_tokens] if request.HasField("max_tokens") else []
    if not limits or min(limits) < 1:
        raise invalid("max_bytes or max_tokens must be at least 1")
    brought = given_in(request)
    if problem := mode_problem(mode.name, brought):
        raise invalid(problem)
    given = {name: value for name, value in brought.items() if name not in SHAPES or value != SHAPES[name]}
    if request.logit_bias:
        _check_taken("logit_bias", mode, SHAPED)
    if request.score_prompt and (mode.name != SCORING or "logprobs" not in given):
        how = "with logprobs, of tokens, or with max_tokens 0"
        what = f"score_prompt (in HTTP echo {how}) is for mode {SCORING}, with logprobs"
        raise invalid(f"{what}: leave it out, or use that mode")
    restricted = ["json_schema (in HTTP response_format)"] * bool(request.json_schema)
    restricted += ["must_call (in HTTP tool_choice)"] * bool(request.must_call) + ["logprobs"] * ("logprobs" in given)
    for name in restricted:
        _check_taken(name, mode, LOGPROB_MODES)
    if request.must_call and (request.json_schema or not request.tools):
        raise invalid("must_call is for tools: give tools, and no json_schema")
    if due_at <= monotonic():
        raise deadline_exceeded("the deadline of this request has passed")
    return Generation(
        **{"codec": mode.default_codec, **given, "max_tokens": min(limits)},
        mode=mode.name,
        prompt=bytes(request.prompt),
        seed=request.seed,
        logit_bias=dict(request.logit_bias),
        json_schema=request.json_schema,
        prompt_tokens=request.prompt_tokens,
        score_prompt=request.score_prompt,
        fits_context=request.fits_context,
        max_bytes=request.max_bytes or None,
        due_at=due_at,
        given=frozenset(brought),
    )


def check_fit(generation: Generation, mode: Mode) -> None:
    """Raise StatusError unless `mode` can do `generation`, already `tokenized` for it, before any host works."""
    generation.check_fit(mode.tokenizer, mode.positions)
    if (generation.top_k or 0) > (size := mode.tokenizer.vocabulary.size):
        raise invalid(f"top_k must be 0 to {size}, not {generation.top_k}: the model has {size} {mode.tokenizer.noun}")
    if generation.json_schema and not generation.ends and mode.tokenizer is not BYTE_TOKENIZER:
        raise failed_precondition("this model has no end-of-text token: it cannot follow a JSON schema")
    if problem := bias_problem(generation.logit_bias, mode.tokenizer.vocabulary.size):
        raise invalid(problem)
    mode.check(generation)


def parsed_chat(request: router_pb2.GenerateRequest) -> ChatPrompt:
    """The request's messages, if any, and the tools that the model may call. Raises StatusError."""
    if (size := len(request.tools.encode())) > MAX_TOOLS_BYTES:
        raise invalid(f"the tools have {size} bytes, at most {MAX_TOOLS_BYTES} can be sent: shorten their descriptions")
    if request.tools and not request.messages:
        raise invalid("tools are for messages: send messages instead of the prompt")
    if not request.messages:
        return ChatPrompt()
    try:
        messages = [Message(each.role, each.content, dict(json.loads(each.more or "{}"))) for each in request.messages]
        tools = list(json.loads(request.tools or "[]"))
    except (ValueError, TypeError, RecursionError):
        raise invalid("tools must be a JSON list, and `more` of a message a JSON object") from None
    if nesting([tools, *(dict(each.more) for each in messages)]) > MAX_NESTING:
        raise invalid(f"tools and messages can have at most {MAX_NESTING} nested objects and lists: flatten them")
    return ChatPrompt(messages, tools, request.must_call, request.continue_last, request.json_schema)


def prompt_bytes(request: router_pb2.GenerateRequest) -> int:
    """Size of a request's text in bytes."""
    size = sum(len(each.content.encode()) + len(each.more.encode()) for each in request.messages)
    size += len(request.prompt) + TOKEN_BYTES * len(request.prompt_tokens)
    return size + len(request.tools.encode()) + len(request.json_schema.encode())


class PromptPools:
    """Threads that tokenize prompts and check schemas while hosts work; the keys take turns."""

    def __init__(self) -> None:
        self.tokenizing = FairPool(TOKENIZING_AT_ONCE, "tokenizing")
        self.checking = FairPool(CHECKS_AT_ONCE, "schema-check")

    async def tokenized(
        self, caller: str, tokenizer: Tokenizer, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if tokenizer is BYTE_TOKENIZER:  # nothing to compute
            return job(*args, **kwargs)
        return await self.tokenizing.run(caller, job, *args, **kwargs)

    async def schema_problem(self, caller: str, schema: str) -> str:
        try:
            return await self.checking.run(caller, schema_problem, schema)
        except subprocess.TimeoutExpired:
            raise exhausted("this machine is too busy to check the JSON schema: try again later", 10_000) from None


async def tokenized(
    generation: Generation, chat: ChatPrompt, mode: Mode, account: Account, pools: PromptPools
) -> Generation:
    """`generation` in the tokens of `mode`, which has no `problem`; counts its prompt in the account.

    :param chat: replaces the prompt if it has messages. Raises StatusError.
    """
    tokenizer, caller = mode.tokenizer, account.context.caller
    check_size(sum(len(each.content.encode()) for each in chat.messages) + len(generation.prompt), mode)
    if chat.messages:
        encoding = pools.tokenized(caller, tokenizer, tokenizer.encode_chat, chat)
        prompt, account.prompt_bytes, schema = await encoding
        if schema:
            _check_taken("tools that are strict", mode, LOGPROB_MODES)
            generation = replace(generation, json_schema=schema)
    elif generation.prompt_tokens:
        prompt = encoded(tokenizer, generation.prompt_tokens)
    else:
        prompt = await pools.tokenized(caller, tokenizer, tokenizer.encode_text, generation.prompt)
        account.prompt_bytes = len(generation.prompt)
    if not prompt:
        raise invalid(f"the prompt has no {tokenizer.noun}: give some text")
    account.vocabulary, account.prompt_tokens = tokenizer.vocabulary, tokenizer.vocabulary.count(prompt)
    if generation.json_schema and (problem := await pools.schema_problem(caller, generation.json_schema)):
        raise invalid(problem)
    if generation.fits_context:
        room = max(mode.positions - account.prompt_tokens, 1)  # `check_fit` refuses a prompt that leaves none
        generation = replace(generation, max_tokens=min(generation.max_tokens, room))
    return replace(generation, prompt=prompt, ends=tokenizer.ends, given_tokens=account.prompt_tokens)


def check_size(size: int, mode: Mode) -> None:
    """Raise StatusError for more bytes than the context of `mode` can ever hold, without tokenizing them."""
    if size > (most := mode.positions * mode.tokenizer.max_token_bytes):
        raise too_long(
            f"the prompt has {size} bytes; the model's context of {mode.positions} {mode.tokenizer.noun} never holds "
            f"more than {most}: shorten it"
        )


def encoded(tokenizer: Tokenizer, tokens: Sequence[int], field: str = "prompt") -> bytes:
    """A client's tokens in wire format. Raises StatusError for a token outside the vocabulary."""
    size = tokenizer.vocabulary.size
    if (largest := max(tokens)) >= size:
        raise invalid(f"{field}: token {largest} does not exist: the model has 0 to {size - 1}")
    return tokenizer.vocabulary.encode(tokens)


def _check_taken(name: str, mode: Mode, takers: Sequence[str]) -> None:
    """Raise StatusError for a setting that means nothing to `mode`. takers: the modes that accept it."""
    if mode.name not in takers:
        raise invalid(f"mode {mode.name} does not take {name}: leave it out, or use mode {', '.join(takers)}")


def _check_texts(request: router_pb2.GenerateRequest) -> None:
    """Raise StatusError unless prompt or messages, and stop strings, are text of an allowed size."""
    check_text("prompt", request.prompt)
    if bool(request.messages) + bool(request.prompt) + bool(request.prompt_tokens) > 1:
        raise invalid("give a prompt or messages, not both")
    if len(request.messages) > MAX_MESSAGES:
        raise invalid(f"{len(request.messages)} messages; a conversation can have at most {MAX_MESSAGES}")
    if (size := sum(len((each.content + each.more).encode()) for each in request.messages)) > MAX_PROMPT_BYTES:
        raise invalid(f"the messages have {size} bytes, at most {MAX_PROMPT_BYTES} can be sent: shorten them")
    for message in request.messages:
        if not re.fullmatch(r"[a-z]{1,16}", message.role):
            raise invalid(f"a message's role must be a word such as user, not {quoted(message.role)}")
    if not (request.prompt or request.messages or request.prompt_tokens):
        raise invalid("the prompt is empty: give at least one byte of text")
    if len(request.stops) > MAX_STOPS:
        raise invalid(f"{len(request.stops)} stop strings; a request can have at most {MAX_STOPS}")
    for stop in request.stops:
        check_text("stop string", stop)
        if not 0 < len(stop) <= MAX_STOP_BYTES:
            raise invalid(f"a stop string must have 1 to {MAX_STOP_BYTES} bytes")


def check_text(what: str, text: bytes) -> None:
    """Raise StatusError unless `text` is UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"the {what} is not UTF-8 (byte {error.start}): send UTF-8 text") from None
