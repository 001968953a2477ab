"""The models that clients can name: one for each mode, and one that chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.client import AsyncClient
from serving.commands import MODE_NAMES
from serving.http.errors import ApiError
from serving.lineup import AUTO, INFILL

MODEL = "onesweep"
PREFERRED = (AUTO, "ar")
"""Modes of the model `onesweep`: the first of these that is served, else the first that is."""


async def mode_of(client: AsyncClient, model: str, asked: str | None, suffix: str, authorization: str | None) -> str:
    """The mode that a request is for. Raises ApiError.

    :param asked: what the request's own field says, if it has it.
    """
    named = model.removeprefix(f"{MODEL}-") if model != MODEL else None
    if named is not None and (named == model or named not in MODE_NAMES):
        raise ApiError(
            404,
            f"no model {model!r}: choose {MODEL} or one of {', '.join(f'{MODEL}-{mode}' for mode in MODE_NAMES)}",
            param="model",
            code="model_not_found",
        )
    if named and asked and named != asked:
        raise ApiError(
            400,
            f"the model is {model}, but onesweep.mode is {asked!r}: name the mode in one of them",
            param="onesweep.mode",
        )
    if named or asked:
        return named or asked or ""
    if suffix:
        return INFILL
    return default_mode((await client.status(authorization=authorization)).modes)


def default_mode(served: Sequence[str]) -> str:
    """What the model `onesweep` is: the best choice of those that are served."""
    return next((mode for mode in (*PREFERRED, *served) if mode in served), AUTO)


def catalogue(served: Sequence[str], context_tokens: int, created: int) -> list[dict[str, Any]]:
    """The entries of /v1/models: `onesweep`, then a model for each mode that is served."""
    modes = {MODEL: default_mode(served)} if served else {}
    modes |= {f"{MODEL}-{mode}": mode for mode in served}
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "onesweep",
            "onesweep": {"mode": mode, "context_tokens": context_tokens},
        }
        for name, mode in modes.items()
    ]
