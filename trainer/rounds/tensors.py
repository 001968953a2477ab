"""Small arithmetic on the parameters of a part, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]  # float32 tensors of one part, by the names of its parameters
Shapes = dict[str, tuple[int, ...]]


def trainable(module: nn.Module) -> Tensors:
    """A copy of a module's trainable parameters in float32 on the CPU."""
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def parameter_shapes(module: nn.Module) -> Shapes:
    """Shapes of a module's trainable parameters."""
    return {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into the parameters of the same names, whatever their device."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


@torch.no_grad()
def share(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let a frozen module use these very tensors, where they are on its device. Nobody may change them."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].data = tensor.to(parameters[name].device)


def shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """Shapes by name, which a codec needs to decode."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def numel(like: Shapes) -> int:
    """Numbers in tensors of these shapes."""
    return sum(math.prod(shape) for shape in like.values())


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def zeros_like(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def add(a: Tensors, b: Tensors, share: float = 1.0) -> Tensors:
    """a + share * b."""
    return _both(a, b, lambda x, y: x + share * y if share != 1.0 else x + y)


def subtract(a: Tensors, b: Tensors) -> Tensors:
    return _both(a, b, torch.sub)


def scale(tensors: Tensors, factor: float) -> Tensors:
    return {name: factor * tensor for name, tensor in tensors.items()}


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, summed in float64; not finite where they are not."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _both(a: Tensors, b: Tensors, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensors:
    if a.keys() != b.keys():
        raise KeyError(f"tensors of other names: {sorted(a.keys() ^ b.keys())}")
    return {name: operation(a[name], b[name]) for name in a}
