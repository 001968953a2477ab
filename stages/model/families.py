"""Families of models that write: those that are trained here, and the Llama family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stages.errors import ShapeError
from stages.model.architecture import CONTEXT, Architecture
from stages.model.llama import LlamaArchitecture, LlamaStage
from stages.model.pipeline import ArStage

TextArchitecture = Architecture | LlamaArchitecture
PipelineStage = ArStage | LlamaStage


def new_stage(architecture: TextArchitecture, index: int) -> PipelineStage:
    """A stage of the architecture's family, with weights as before training."""
    return ArStage(architecture, index) if isinstance(architecture, Architecture) else LlamaStage(architecture, index)


def read_architecture(record: Mapping[str, Any]) -> TextArchitecture:
    """The architecture of a manifest's JSON object, of whatever family. Raises ShapeError, KeyError or TypeError."""
    if "family" in record:
        return LlamaArchitecture.from_record(record)
    sizes = dict(record)
    if (context := sizes.pop("context")) != CONTEXT:
        raise ShapeError(f"architecture: context must be {CONTEXT!r}, not {context!r}: every block reads the text")
    return Architecture(**sizes)


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
