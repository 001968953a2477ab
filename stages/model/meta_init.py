"""Modules of which only the shapes are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


# torch's own meta device imports the compiler with its first random number: 1.7 s of processor in every host.
class _Unfilled(TorchFunctionMode):
    """Leaves out what gives new weights their first values."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are made in it have shapes only: their weights are read later, or never.

    Their first values are not drawn either: without memory torch does so by way of its compiler, whose import takes
    as long as that of all the rest.
    """
    with torch.device("meta"), _Unfilled():
        yield
