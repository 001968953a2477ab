"""What a request asks of the router."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from serving.http.fields import DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest, TextRequest
from serving.request import MAX_SEED, RequestSettings

RANDOM_SEEDS = 1 << 53
"""So that a seed that we drew comes back whole from readers that take JSON's numbers for doubles."""


@dataclass(frozen=True)
class Order:
    """One prompt, and the choices that are asked of it."""

    prompt: str
    """Empty where the settings have messages."""
    seeds: tuple[int, ...]
    """Of each choice."""
    timeout_s: float
    settings: RequestSettings
    """With the seed of the first choice."""
    authorization: str | None = field(default=None, repr=False)


def order_of(
    request: TextRequest, prompt: str, suffix: str, mode: str, timeout_s: float, authorization: str | None
) -> Order:
    """:param timeout_s: where the request names none."""
    own = request.onesweep
    seed = secrets.randbelow(RANDOM_SEEDS) if request.seed is None else request.seed
    settings: RequestSettings = {
        "mode": mode,
        "max_tokens": max_tokens_of(request),
        "seed": seed,
        "temperature": request.temperature,
        "chunk": own.chunk,
        "steps": own.steps,
        "codec": own.codec,
        "sampler": own.sampler,
        "drafter": own.drafter,
        "draft": own.draft,
        "branches": own.branches,
        "scorer": own.scorer,
        "candidates": own.candidates,
        "suffix": suffix,
        "budget_ms": own.budget_ms,
        "stops": request.stop or (),
        "messages": messages_of(request),
    }
    return Order(
        prompt,
        tuple((seed + index) % (MAX_SEED + 1) for index in range(request.n or 1)),
        own.timeout_s or timeout_s,
        settings,
        authorization,
    )


def max_tokens_of(request: TextRequest) -> int:
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return newer or request.max_tokens or DEFAULT_MAX_TOKENS


def suffix_of(request: TextRequest) -> str:
    """OpenAI's field of completions, or ours."""
    return (request.suffix if isinstance(request, CompletionRequest) else None) or request.onesweep.suffix or ""


def messages_of(request: TextRequest) -> list[tuple[str, str]]:
    """Role and content of each; none where there is a prompt."""
    return [(each.role, each.content) for each in request.messages] if isinstance(request, ChatRequest) else []
