"""Small tensors and updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.rounds.store import Update
from trainer.rounds.tensors import Tensors


def make_tensors(seed: int, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.weight": scale * torch.randn(6, 5, generator=generator),
        "bias": scale * torch.randn(7, generator=generator),
        "gain": scale * torch.randn((), generator=generator),
    }


@pytest.fixture
def tensors() -> Callable[..., Tensors]:
    """`tensors(seed)`: a matrix, a vector and a number, always the same."""
    return make_tensors


@pytest.fixture
def update() -> Callable[..., Update]:
    """`update(round, worker=0)`: what that worker hands in for that round."""

    def make(number: int = 0, worker: int = 0, **changes: object) -> Update:
        fields: dict[str, object] = {
            "id": f"w{worker}-{number}",
            "worker": f"w{worker}",
            "fragment": "p",
            "base_version": number,
            "round": number,
            "steps": 4,
            "sequences": 8,
            "delta": make_tensors(100 * number + worker, 0.1),
        }
        return Update(**{**fields, **changes})  # type: ignore[arg-type]

    return make
