"""A device of its own, for machines without a GPU: it computes as the CPU does, in memory that the CPU cannot read.

Like a GPU it refuses arithmetic with tensors of the CPU, unless they are a single number. It counts what is read from
it, for which a GPU would have to be waited for. PyTorch knows it by the name `pretend`, once and for all, so a process
that uses it does nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import stages.device

NAME = "pretend"
MATHS = 0
"""Attention in plain products, as SDPBackend has it."""


class Far(Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Far:
        options: dict[str, Any] = {"dtype": held.dtype, "device": torch.device(NAME, 0)}
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), held.storage_offset(), **options)
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the device")


class Device(TorchDispatchMode):
    """As long as it is entered, the device is there."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        """Numbers and tensors that were fetched from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, Far)]
        is_far = isinstance(args[0], Far) if name == "aten::copy_" else bool(far)
        if far and name != "aten::copy_" and any(tensor.dim() for tensor in tensors if not isinstance(tensor, Far)):
            raise RuntimeError(f"{name}: tensors of two devices")
        if name == "aten::_fused_sdp_choice":
            return MATHS
        if kwargs.get("device") is not None:
            is_far = torch.device(kwargs["device"]).type == NAME
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        is_number = name in ("aten::_local_scalar_dense", "aten::item")
        self.reads += bool(far) and (is_number or not is_far)
        if not is_far:
            return out
        known = {id(tensor.held): tensor for tensor in far}  # an operation in place returns its argument
        return tree_map(lambda o: known[id(o)] if id(o) in known else Far(o) if isinstance(o, Tensor) else o, out)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Far) else value


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


def introduced() -> Device:
    """The device, which this process knows from now on; it is there while it is entered."""
    stages.device.check_device = lambda name: name
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch._C._set_only_lift_cpu_tensors(True)  # or torch.tensor(..., device=...) goes past the mode
    return Device()
