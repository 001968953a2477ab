"""Settings of a request, and the message that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from serving.v1 import router_pb2
from stages.errors import InputError

MAX_BYTES = (1 << 32) - 1
MAX_SEED = (1 << 64) - 1
MAX_PROMPT_BYTES = 1 << 20
"""No text is longer."""
DEFAULT_MAX_BYTES = 128
MAX_STOPS = 4
MAX_STOP_BYTES = 256
MAX_MESSAGES = 1024


class RequestSettings(TypedDict, total=False):
    """Settings of a request; those that are None or left out are the router's to choose."""

    mode: str
    max_bytes: int | None
    max_tokens: int | None
    stops: Sequence[str | bytes]
    messages: Sequence[tuple[str, str]]
    seed: int
    temperature: float | None
    chunk: int | None
    steps: int | None
    codec: str | None
    sampler: str | None
    drafter: str | None
    draft: int | None
    branches: int | None
    scorer: str | None
    candidates: int | None
    suffix: str | bytes
    budget_ms: int | None


class TimedSettings(RequestSettings, total=False):
    """The same, with how long to wait for the whole answer."""

    timeout_s: float


def request_of(
    prompt: str | bytes,
    *,
    mode: str = "sweep",
    max_bytes: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    temperature: float | None = None,
    chunk: int | None = None,
    steps: int | None = None,
    codec: str | None = None,
    sampler: str | None = None,
    drafter: str | None = None,
    draft: int | None = None,
    branches: int | None = None,
    scorer: str | None = None,
    candidates: int | None = None,
    suffix: str | bytes = b"",
    budget_ms: int | None = None,
    stops: Sequence[str | bytes] = (),
    messages: Sequence[tuple[str, str]] = (),
    whole: bool = False,
    trips: bool = False,
) -> router_pb2.GenerateRequest:
    """A request message; None leaves a setting to the router. Raises InputError for what the message cannot carry.

    :param max_bytes: of text, and :param max_tokens: each a limit; 128 bytes where there is neither.
    :param messages: (role, content), to go on with in place of a prompt.
    """
    raw, following = _raw("prompt", prompt), _raw("suffix", suffix)
    if max_bytes is None and max_tokens is None:
        max_bytes = DEFAULT_MAX_BYTES
    names = (("mode", mode), ("codec", codec), ("sampler", sampler), ("drafter", drafter), ("scorer", scorer))
    for word, text in names:
        if text is not None:
            _word(word, text)
    for name, value, least, most in (
        ("max_bytes", max_bytes, 1, MAX_BYTES),
        ("max_tokens", max_tokens, 1, MAX_BYTES),
        ("seed", seed, 0, MAX_SEED),
        ("chunk", chunk, 1, MAX_BYTES),
        ("steps", steps, 1, MAX_BYTES),
        ("draft", draft, 1, MAX_BYTES),
        ("branches", branches, 1, MAX_BYTES),
        ("candidates", candidates, 1, MAX_BYTES),
        ("budget_ms", budget_ms, 1, MAX_BYTES),
    ):
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            raise InputError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return router_pb2.GenerateRequest(
        prompt=raw,
        mode=mode,
        max_bytes=max_bytes or 0,
        seed=seed,
        temperature=temperature,
        chunk=chunk,
        steps=steps,
        codec=codec,
        sampler=sampler,
        drafter=drafter,
        draft=draft,
        branches=branches,
        scorer=scorer,
        candidates=candidates,
        suffix=following,
        budget_ms=budget_ms,
        max_tokens=max_tokens,
        stops=[_raw("stop string", stop) for stop in stops],
        messages=[router_pb2.Message(role=_word("role", role), content=_text(content)) for role, content in messages],
        whole=whole,
        trips=trips,
    )


def _word(what: str, word: str) -> str:
    if not word.isascii():
        raise InputError(f"unknown {what} {word!r}: its name has letters that no {what} has")
    return word


def _text(content: str) -> str:
    return _raw("message", content).decode()


def _raw(name: str, text: str | bytes) -> bytes:
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise InputError(f"the {name} is not UTF-8: check the terminal's or file's encoding") from None
    if len(raw) > MAX_PROMPT_BYTES:
        raise InputError(f"the {name} has {len(raw)} bytes, at most {MAX_PROMPT_BYTES} can be sent: shorten it")
    return raw
