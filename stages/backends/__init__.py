"""The backend, which computes a host's parts; and runners on a device other than the processor."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, PictureRunner, StageRunner
from stages.backends.packed import PackedBlock
from stages.backends.packed_llama import packed_stage
from stages.backends.pictures import PackedPictures
from stages.backends.rows import product_threads
from stages.backends.runner_checks import checked
from stages.checkpoint.checkpoint import CPU
from stages.device import device_kind, machine_kind
from stages.model.block import Block
from stages.model.pipeline import PipelineStage
from stages.pictures.part import PicturePart

# Set before onnxruntime is imported: from 1.29 on it reports every session to its makers, and keeps a machine ID.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

P = TypeVar("P", CleanPiece, BranchPiece)


class DeviceRunner(BlockRunner, StageRunner):
    """A runner of a block or a stage that is on a device, like the caches of its pieces.

    All tensors that a call needs from its pieces go to the device in one transfer, and all results come back in one: a
    transfer waits for the device, whatever its size.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:  # noqa: ANN401 - a BlockRunner or a StageRunner
        self.runner, self.device = runner, device

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return _fetched(self.runner.read(self._there(pieces)))

    @torch.inference_mode()
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return _fetched(self.runner.branch(self._there(pieces)))

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        sent = self._sent([x for piece in pieces for x in (piece.z, piece.estimate)])
        there = [replace(piece, z=sent[2 * i], estimate=sent[2 * i + 1]) for i, piece in enumerate(pieces)]
        found = _fetched([x for each in self.runner.denoise(there) for x in (each.logits, each.point)])
        return [Denoised(*both) for both in zip(found[::2], found[1::2], strict=True)]

    @torch.inference_mode()
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return _fetched(self.runner.next_byte(self._sent(hidden)))

    def _there(self, pieces: Sequence[P]) -> list[P]:
        sources = self._sent([piece.source for piece in pieces])
        return [replace(piece, source=source) for piece, source in zip(pieces, sources, strict=True)]

    def _sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors of one type from the processor's memory to the device."""
        numbers = torch.cat([x.flatten() for x in tensors])
        if self.device.type == "cuda":  # the device copies pinned memory without the processor
            numbers = numbers.pin_memory()
        return _as(tensors, numbers.to(self.device, non_blocking=self.device.type == "cuda"))


def _fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one type from the device to the processor's memory."""
    return _as(tensors, torch.cat([x.flatten() for x in tensors]).cpu())


def _as(shaped: Sequence[Tensor], numbers: Tensor) -> list[Tensor]:
    """Split `numbers` into tensors of these shapes, in order."""
    parts = numbers.split([x.numel() for x in shaped])
    return [part.view(x.shape) for part, x in zip(parts, shaped, strict=True)]


class Backend:
    """Makes runners of loaded parts, for a device."""

    def __init__(self, device: torch.device = CPU, threads: int | None = None) -> None:
        """:param threads: threads of products; by default as many as torch uses."""
        self.device, self.threads = device, threads or torch.get_num_threads()

    @property
    def kind(self) -> str:
        """The device's name for other machines."""
        return device_kind(self.device)

    @property
    def machine(self) -> str:
        """The same with versions and the processor: hosts with equal strings compute the same bits."""
        return machine_kind(self.device, self.threads)

    def block(self, block: Block) -> BlockRunner:
        with product_threads(self.threads):
            runner = PackedBlock(block)
        return checked(runner if self.device == CPU else DeviceRunner(runner, self.device), block)

    def stage(self, stage: PipelineStage) -> StageRunner:
        with product_threads(self.threads):
            runner = packed_stage(stage)
        return checked(runner if self.device == CPU else DeviceRunner(runner, self.device), stage)

    def picture(self, part: PicturePart) -> PictureRunner:
        with product_threads(self.threads):
            runner = PackedPictures(part)
        return checked(runner, part)
