"""The device of a training: this machine's processor, or one of its GPUs."""

# Updates and checkpoints are float32 on the CPU. Text and noise are drawn on the CPU too, so that a step's batch is the
# same on every device.

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.errors import CheckpointError, ConfigError
from trainer.blocks.data import Corpus

NAME = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class PlacedCorpus(Corpus):
    """Text whose batches lie on a device."""

    device: str = "cpu"

    def batch(self, seed: int, step: int, sequences: int, length: int) -> Tensor:
        return super().batch(seed, step, sequences, length).to(self.device)

    def valid_batch(self, sequences: int, length: int) -> Tensor:
        return super().valid_batch(sequences, length).to(self.device)


def check_device(name: str) -> str:
    """`name`, if it is a device of this machine. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, not {name[:40]!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and (torch.device(name).index or 0) >= count:
        there = f"GPUs 0 to {count - 1}" if count > 1 else "one GPU, 0" if count else "no GPU that it can use"
        raise ConfigError(f"there is no device {name} here: PyTorch {torch.__version__} sees {there}")
    return name


@contextmanager
def within_memory(device: str, advice: str) -> Iterator[None]:
    """Raise CheckpointError with `advice` when a GPU runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise CheckpointError(f"not enough memory on {device}: {advice}") from None
