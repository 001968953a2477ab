"""What the teacher has read and written, with what its head was given at each place: kept on disk."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.checkpoint import replace_file
from stages.randomness import Purpose, uniforms
from trainer.data import Corpus
from trainer.distill.settings import DistillSettings
from trainer.distill.teacher import Teacher

ROWS = 32
"""Windows in a sample: so many are written side by side, which costs little more than one."""
HELD_OUT_ROWS = 8
FIRST = 2
"""Samples before the first step: the lens is fitted to them."""
MAX_DISK_BYTES = 1 << 30
SHORTEST_PROMPT = 8


class Samples:
    """Sample n is a pure function of (seed, n), and what step s reads of (seed, s): a run can resume anywhere."""

    def __init__(
        self, teacher: Teacher, corpus: Corpus, settings: DistillSettings, directory: Path, identity: str
    ) -> None:
        """:param identity: names the run; what another one left behind is not read."""
        self.teacher, self.corpus, self.settings, self.directory = teacher, corpus, settings, directory
        self.identity, self.oldest = identity, 0
        width = teacher.stages[0].architecture.width
        self.shape = (ROWS, settings.window, width)
        self.kept = max(FIRST, MAX_DISK_BYTES // (teacher.dtype.itemsize * math.prod(self.shape)))
        directory.mkdir(parents=True, exist_ok=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Symbols (sequences, window) int64, and the teacher's features (sequences, window, width)."""
        s = self.settings
        newest = FIRST - 1 + int(step * s.sequences / (s.passes * ROWS))
        oldest = max(0, newest + 1 - self.kept)
        draws = uniforms(s.seed, Purpose.TRAINING, 0, s.sequences, 2, step)
        chosen = [(oldest + int(u * (newest + 1 - oldest) * (1 - 2**-53)), int(v * ROWS) % ROWS) for u, v in draws]
        for index in range(self.oldest, oldest):
            self._path(index).unlink(missing_ok=True)
        self.oldest = oldest
        pairs = [self.row(index, row) for index, row in chosen]
        return torch.stack([symbols for symbols, _ in pairs]), torch.stack([features for _, features in pairs])

    def row(self, index: int, row: int) -> tuple[Tensor, Tensor]:
        """One window of a sample, which is made if it is not there."""
        path = self._path(index)
        for _ in range(2):
            try:
                with safe_open(path, framework="pt") as file:
                    symbols, features = (file.get_slice(name) for name in ("symbols", "features"))
                    is_own = (file.metadata() or {}).get("identity") == self.identity
                    if is_own and tuple(features.get_shape()) == self.shape:
                        return symbols[row].long(), features[row]
            except (SafetensorError, OSError, KeyError):
                pass
            self._make(index, path)
        raise AssertionError(f"{path} was written and cannot be read")

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """All windows of one: (32, window) int64, (32, window, width)."""
        pairs = [self.row(index, row) for row in range(ROWS)]
        return torch.stack([symbols for symbols, _ in pairs]), torch.stack([features for _, features in pairs])

    def drop(self) -> None:
        """Forget them all: the run is over."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        self.directory.rmdir()

    def _path(self, index: int) -> Path:
        return self.directory / f"sample-{index}.safetensors"

    def _make(self, index: int, path: Path) -> None:
        s = self.settings
        is_written, share = uniforms(s.seed, Purpose.WINDOWS, 1, 1, 2, index)[0]
        text = self.corpus.batch(s.seed, index, ROWS, s.window)
        if is_written <= s.written:
            longest = max(s.window // 2, SHORTEST_PROMPT)
            prompt = SHORTEST_PROMPT + int(share * (longest - SHORTEST_PROMPT))
            text, features = self.teacher.write(text[:, :prompt], s.window, s.seed + index)
        else:
            features = torch.cat([self.teacher.read(part) for part in text.split(s.sequences)])
        tensors = {"symbols": text.int().cpu(), "features": features.cpu().contiguous()}
        replace_file(path, lambda temporary: save_file(tensors, temporary, {"identity": self.identity}))


def held_out(teacher: Teacher, corpus: Corpus, window: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Text that no step reads: `text`, and `written` by the teacher after the beginnings of it.

    Each as symbols (rows, window) and features (rows, window, width), and rows such that windows do not overlap.
    """
    rows = max(1, min(HELD_OUT_ROWS, len(corpus.valid) // window))
    text = corpus.valid_batch(rows, window)
    prompts = text[:, : max(window // 8, 2)]
    return {
        "text": (text, torch.cat([teacher.read(row[None]) for row in text])),
        "written": teacher.write(prompts, window, seed),
    }
