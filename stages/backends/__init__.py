"""Backends: what computes a host's parts, by name."""

import torch

from stages.backends.base import Backend, BlockRunner, DraftingRunner, PictureRunner, StageRunner
from stages.backends.on_device import DeviceRunner
from stages.backends.packed import PackedBlock
from stages.backends.packed_llama import packed_stage
from stages.backends.pictures import PackedPictures
from stages.backends.runner_checks import checked, checked_pictures
from stages.checkpoint.checkpoint import CPU
from stages.errors import InputError, one_of
from stages.model.block import Block
from stages.model.families import PipelineStage
from stages.pictures.part import PicturePart

__all__ = ["BACKENDS", "DEFAULT_BACKEND", "Backend", "TorchBackend", "backend_named", "drafting_runner"]

BACKENDS = ("torch", "onnxruntime", "onnxruntime-int8")
DEFAULT_BACKEND = "torch"


class TorchBackend(Backend):
    """PyTorch, eager.

    :param device: where the parts are that it is given, and their sessions' caches.
    """

    name = "torch"

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def block(self, block: Block) -> BlockRunner:
        runner = PackedBlock(block)
        return checked(runner if self.device == CPU else DeviceRunner(runner, self.device), block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        runner = packed_stage(stage)
        return checked(runner if self.device == CPU else DeviceRunner(runner, self.device), stage)

    def picture(self, part: PicturePart) -> PictureRunner:
        return checked_pictures(PackedPictures(part), part)


def backend_named(name: str, device: torch.device = CPU) -> Backend:
    """The backend called `name`, on a device that it computes on. Raises InputError that lists the names, or says which
    extra to install."""
    if name == TorchBackend.name:
        return TorchBackend(device)
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}{one_of(name, BACKENDS)}")
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
