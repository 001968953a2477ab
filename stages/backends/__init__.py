"""Backends: what computes a host's parts, by name."""

from __future__ import annotations

from stages.backends.base import Backend, DraftingRunner
from stages.backends.eager import TorchBackend
from stages.backends.packed_llama import packed_stage
from stages.errors import InputError
from stages.model.families import PipelineStage

__all__ = ["BACKENDS", "DEFAULT_BACKEND", "Backend", "backend_named", "drafting_runner"]

BACKENDS = ("torch", "onnxruntime", "onnxruntime-int8")
DEFAULT_BACKEND = "torch"


def backend_named(name: str) -> Backend:
    """The backend called `name`. Raises InputError that lists the names, or says which extra to install."""
    if name == TorchBackend.name:
        return TorchBackend()
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}; choose from {', '.join(BACKENDS)}")
    try:
        from stages.backends.onnx import OnnxBackend, OnnxInt8Backend
    except ImportError as error:
        raise InputError(
            f"the backend {name} needs onnxruntime, which is not installed here ({error}): "
            "pip install 'onesweep[onnx]', or choose --backend torch"
        ) from None
    return OnnxInt8Backend() if name == OnnxInt8Backend.name else OnnxBackend()


def drafting_runner(stage: PipelineStage) -> DraftingRunner:
    """Runner for a stage of the router's own model. It may take the stage's matrices over."""
    return packed_stage(stage)
