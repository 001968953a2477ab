"""Checks a client's request field by field, before any host works for it."""

from __future__ import annotations

import math
import time

import grpc

from serving.drafting import MAX_DRAFT
from serving.modes import MODES, Generation, Mode
from serving.modes.base import DEFAULT_CHUNK, DEFAULT_STEPS, DEFAULT_TEMPERATURE
from serving.modes.speculative import DRAFTERS
from serving.v1 import router_pb2
from stages.admission import MAX_STEPS, MAX_TEMPERATURE
from stages.refusal import Refusal, invalid


def check_mode(name: str, modes: dict[str, Mode]) -> Mode:
    """The mode called `name`. Raises Refusal."""
    if name not in modes:
        raise invalid(f"unknown mode {name!r}; choose from {', '.join(MODES)}")
    return modes[name]


def check_request(request: router_pb2.GenerateRequest, mode: Mode, deadline_unix_ms: int) -> Generation:
    """A Generation for `mode` from a message, checked as far as it can be without knowing the hosts.

    Raises Refusal with a sentence that says what to change.
    """
    _check_prompt(request.prompt)
    if request.max_bytes < 1:
        raise invalid("max_bytes must be at least 1")
    temperature = request.temperature if request.HasField("temperature") else DEFAULT_TEMPERATURE
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise invalid(f"temperature must be 0 to {MAX_TEMPERATURE:g}, not {temperature}")
    steps = request.steps if request.HasField("steps") else DEFAULT_STEPS
    if not 1 <= steps <= MAX_STEPS:
        raise invalid(f"steps must be 1 to {MAX_STEPS}, not {steps}")
    chunk = request.chunk if request.HasField("chunk") else DEFAULT_CHUNK
    if chunk < 1:
        raise invalid("chunk must be at least 1 byte")
    codec = request.codec if request.HasField("codec") else mode.default_codec
    if codec not in mode.codecs:
        raise invalid(f"mode {mode.name} has no codec {codec!r}; choose from {', '.join(mode.codecs)}")
    drafter = request.drafter if request.HasField("drafter") else None
    if drafter is not None and drafter not in DRAFTERS:
        raise invalid(f"unknown drafter {drafter!r}; choose from {', '.join(DRAFTERS)}")
    draft = request.draft if request.HasField("draft") else None
    if draft is not None and not 1 <= draft <= MAX_DRAFT:
        raise invalid(f"draft must be 1 to {MAX_DRAFT} bytes, not {draft}")
    if deadline_unix_ms <= time.time() * 1000:
        raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
    return Generation(
        bytes(request.prompt),
        request.max_bytes,
        request.seed,
        deadline_unix_ms,
        temperature,
        chunk,
        steps,
        codec,
        drafter,
        draft,
    )


def check_fit(generation: Generation, mode: Mode) -> None:
    """Raise Refusal unless `mode` has weights, and a context that `generation` fits."""
    if mode.problem:
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"mode {mode.name} cannot be served: {mode.problem}")
    prompt, output = len(generation.prompt), generation.max_bytes
    if prompt + output > mode.context_bytes:
        raise invalid(
            f"prompt ({prompt} bytes) and output ({output}) together take {prompt + output} bytes, "
            f"the model's context is {mode.context_bytes}: shorten one of them"
        )


def _check_prompt(prompt: bytes) -> None:
    if not prompt:
        raise invalid("the prompt is empty: give at least one byte of text")
    try:
        prompt.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"the prompt is not UTF-8 (byte {error.start}): send UTF-8 text") from None
