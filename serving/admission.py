"""Checks a client's request field by field, before any host works for it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc

from serving.accounting import Account
from serving.guess_growth import MAX_BRANCHES
from serving.modes import MODES, Generation, Mode
from serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from serving.modes.scored import SCORERS
from serving.modes.speculative import DRAFTERS
from serving.request import MAX_MESSAGES, MAX_PROMPT_BYTES, MAX_STOP_BYTES, MAX_STOPS
from serving.spelling import Message
from serving.v1 import router_pb2
from stages.admission import MAX_STEPS, MAX_TEMPERATURE
from stages.refusal import Refusal, invalid
from stages.samplers import DEFAULT_SAMPLER, SAMPLERS
from stages.scoring import MAX_CANDIDATES


def check_mode(name: str, modes: dict[str, Mode]) -> Mode:
    """The mode called `name`. Raises Refusal."""
    if name not in modes:
        raise invalid(f"unknown mode {name!r}; choose from {', '.join(MODES)}")
    return modes[name]


def check_request(request: router_pb2.GenerateRequest, mode: Mode, deadline_unix_ms: int) -> Generation:
    """A Generation for `mode` from a message, checked as far as it can be without knowing the hosts.

    Raises Refusal with a sentence that says what to change.
    """
    _check_text("prompt", request.prompt)
    _check_messages(request)
    if not request.prompt and not request.messages:
        raise invalid("the prompt is empty: give at least one byte of text")
    _check_text("suffix", request.suffix)
    _check_stops(request.stops)
    if request.suffix and not mode.fills:
        raise invalid(f"mode {mode.name} does not look at a suffix: leave it out, or use mode infill")
    limits = [request.max_bytes] if request.max_bytes else []
    limits += [request.max_tokens] if request.HasField("max_tokens") else []
    if not limits or min(limits) < 1:
        raise invalid("max_bytes or max_tokens must be at least 1")
    for name in mode.chooses:
        if request.HasField(name):
            raise invalid(f"mode {mode.name} chooses {name} itself: leave it out, or name a mode")
    budget_ms = request.budget_ms if request.HasField("budget_ms") else None
    if budget_ms is not None and not mode.keeps_budget:
        raise invalid(f"mode {mode.name} takes the time that it takes: leave budget_ms out, or use mode auto")
    if budget_ms is not None and budget_ms < 1:
        raise invalid("budget_ms must be at least 1")
    temperature = request.temperature if request.HasField("temperature") else DEFAULT_TEMPERATURE
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise invalid(f"temperature must be 0 to {MAX_TEMPERATURE:g}, not {temperature}")
    steps = request.steps if request.HasField("steps") else DEFAULT_STEPS
    if not 1 <= steps <= MAX_STEPS:
        raise invalid(f"steps must be 1 to {MAX_STEPS}, not {steps}")
    chunk = request.chunk if request.HasField("chunk") else None
    if chunk is not None and chunk < 1:
        raise invalid("chunk must be at least 1")
    codec = request.codec if request.HasField("codec") else mode.default_codec
    if codec not in mode.codecs:
        raise invalid(f"mode {mode.name} has no codec {codec!r}; choose from {', '.join(mode.codecs)}")
    drafter = request.drafter if request.HasField("drafter") else None
    if drafter is not None and drafter not in DRAFTERS:
        raise invalid(f"unknown drafter {drafter!r}; choose from {', '.join(DRAFTERS)}")
    draft = request.draft if request.HasField("draft") else None
    if draft is not None and not 1 <= draft <= mode.most_draft:
        raise invalid(f"draft must be 1 to {mode.most_draft}, not {draft}")
    branches = request.branches if request.HasField("branches") else None
    if branches is not None and not 1 <= branches <= MAX_BRANCHES:
        raise invalid(f"branches must be 1 to {MAX_BRANCHES}, not {branches}")
    sampler = request.sampler if request.HasField("sampler") else DEFAULT_SAMPLER
    if sampler not in SAMPLERS:
        raise invalid(f"unknown sampler {sampler!r}; choose from {', '.join(SAMPLERS)}")
    scorer = request.scorer if request.HasField("scorer") else None
    if scorer is not None and scorer not in SCORERS:
        raise invalid(f"unknown scorer {scorer!r}; choose from {', '.join(SCORERS)}")
    candidates = request.candidates if request.HasField("candidates") else None
    if candidates is not None and not 1 <= candidates <= MAX_CANDIDATES:
        raise invalid(f"candidates must be 1 to {MAX_CANDIDATES}, not {candidates}")
    if deadline_unix_ms <= time.time() * 1000:
        raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
    return Generation(
        bytes(request.prompt),
        min(limits),
        request.seed,
        deadline_unix_ms,
        temperature,
        chunk,
        steps,
        codec,
        drafter,
        draft,
        branches,
        scorer,
        candidates,
        bytes(request.suffix),
        budget_ms,
        own_temperature=request.HasField("temperature"),
        sampler=sampler,
    )


def check_fit(generation: Generation, mode: Mode) -> None:
    """Raise Refusal unless `mode` can do `generation`, which was `spelled` for it: no host is asked before."""
    noun, prompt, output = mode.spelling.noun, mode.spelling.alphabet.count(generation.prompt), generation.max_symbols
    if prompt + output > mode.positions:
        raise invalid(
            f"prompt ({prompt} {noun}) and output ({output}) together take {prompt + output}, "
            f"the model's context is {mode.positions}: shorten one of them"
        )
    mode.check(generation)


async def spelled(generation: Generation, messages: Sequence[Message], mode: Mode, account: Account) -> Generation:
    """`generation` in the symbols of `mode`, which has no `problem`; its prompt goes into the account.

    :param messages: in place of its prompt, where there are any. Raises Refusal.
    """
    if mode.problem:
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"mode {mode.name} cannot be served: {mode.problem}")
    spelling = mode.spelling
    if messages:
        prompt, account.prompt_bytes = await spelling.spell_chat(messages)
    else:
        prompt, account.prompt_bytes = await spelling.spell(generation.prompt), len(generation.prompt)
    if not prompt:
        raise invalid(f"the prompt has no {spelling.noun}: give some text")
    account.alphabet, account.prompt_tokens = spelling.alphabet, spelling.alphabet.count(prompt)
    suffix = await asyncio.to_thread(spelling.plain, generation.suffix.decode()) if generation.suffix else b""
    return replace(generation, prompt=prompt, suffix=suffix, ends=spelling.ends)


def _check_messages(request: router_pb2.GenerateRequest) -> None:
    if request.messages and request.prompt:
        raise invalid("give a prompt or messages, not both")
    if len(request.messages) > MAX_MESSAGES:
        raise invalid(f"{len(request.messages)} messages; a conversation has at most {MAX_MESSAGES}")
    if (size := sum(len(message.content.encode()) for message in request.messages)) > MAX_PROMPT_BYTES:
        raise invalid(f"the messages have {size} bytes, at most {MAX_PROMPT_BYTES} can be sent: shorten them")
    for message in request.messages:
        if not re.fullmatch(r"[a-z]{1,16}", message.role):
            raise invalid(f"a message's role must be a word such as user, not {message.role[:40]!r}")


def _check_stops(stops: Sequence[bytes]) -> None:
    if len(stops) > MAX_STOPS:
        raise invalid(f"{len(stops)} stop strings; at most {MAX_STOPS}")
    for stop in stops:
        _check_text("stop string", stop)
        if not 0 < len(stop) <= MAX_STOP_BYTES:
            raise invalid(f"a stop string has 1 to {MAX_STOP_BYTES} bytes")


def _check_text(what: str, text: bytes) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"the {what} is not UTF-8 (byte {error.start}): send UTF-8 text") from None
