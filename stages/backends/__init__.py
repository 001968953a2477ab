"""Backends: what computes a host's parts, by name."""

from __future__ import annotations

from stages.backends.base import Backend
from stages.backends.packed import TorchBackend
from stages.errors import InputError

__all__ = ["BACKENDS", "DEFAULT_BACKEND", "Backend", "backend_named"]

BACKENDS = ("torch",)
DEFAULT_BACKEND = "torch"


def backend_named(name: str) -> Backend:
    """The backend called `name`. Raises InputError that lists the names, or says which extra to install."""
    if name == TorchBackend.name:
        return TorchBackend()
    raise InputError(f"unknown backend {name!r}; choose from {', '.join(BACKENDS)}")
