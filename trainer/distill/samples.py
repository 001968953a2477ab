"""Samples of a distillation: texts that the teacher read or wrote, with its features at each position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.checkpoint.checkpoint import read_companion, replace_file
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest
from stages.errors import DataError
from stages.model.randomness import Purpose, uniforms
from trainer.blocks.data import Corpus, TextTokenizer, load_corpus
from trainer.distill.settings import DistillSettings
from trainer.distill.teacher import Teacher

# Windows in a sample. They are written side by side, which costs little more than one: on a GPU, far more of them.
ROWS, GPU_ROWS = 32, 1024
HELD_OUT_ROWS = 8
FIRST = 2  # samples before the first step: the lens is fitted to them
MAX_DISK_BYTES = 1 << 30
MAX_GPU_BYTES = 4 << 30
SHORTEST_PROMPT = 8


class Samples:
    """Sample n is a pure function of (seed, n), and the batch of step s of (seed, s), so a run can resume anywhere.

    They are on disk, as a processor takes long to make them. A GPU makes one in seconds, and keeps them in its memory.
    """

    def __init__(
        self, teacher: Teacher, corpus: Corpus, settings: DistillSettings, directory: Path, identity: str
    ) -> None:
        """identity: digest of the run; samples that another run left behind are not read."""
        self.teacher, self.corpus, self.settings, self.directory = teacher, corpus, settings, directory
        self.identity, self.oldest = identity, 0
        width = teacher.stages[0].architecture.width
        self.in_memory = torch.device(teacher.device).type != "cpu"
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # where they are in memory
        self.rows, room = (GPU_ROWS, MAX_GPU_BYTES) if self.in_memory else (ROWS, MAX_DISK_BYTES)
        self.shape = (self.rows, settings.window, width)
        self.kept = max(FIRST, room // (teacher.dtype.itemsize * math.prod(self.shape)))
        directory.mkdir(parents=True, exist_ok=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Symbols (sequences, window) int64, and the teacher's features (sequences, window, width)."""
        s = self.settings
        newest = FIRST - 1 + int(step * s.sequences / (s.passes * self.rows))
        oldest = max(0, newest + 1 - self.kept)
        draws = uniforms(s.seed, Purpose.TRAINING, 0, s.sequences, 2, step)
        count = newest + 1 - oldest
        chosen = [(oldest + int(u * count * (1 - 2**-53)), int(v * self.rows) % self.rows) for u, v in draws]
        # The oldest samples make room for new ones.
        for index in range(self.oldest, oldest):
            self._path(index).unlink(missing_ok=True)
            self.held.pop(index, None)
        self.oldest = oldest
        pairs = [self.row(index, row) for index, row in chosen]
        return torch.stack([symbols for symbols, _ in pairs]), torch.stack([features for _, features in pairs])

    def row(self, index: int, row: int) -> tuple[Tensor, Tensor]:
        """One window of a sample, which is made if it is not there."""
        if self.in_memory:
            if index not in self.held:
                self.held[index] = self._made(index)
            symbols, features = self.held[index]
            return symbols[row], features[row]
        path = self._path(index)
        # A sample that is missing or damaged is made again, and then read.
        for _ in range(2):
            try:
                with safe_open(path, framework="pt") as file:
                    symbols, features = (file.get_slice(name) for name in ("symbols", "features"))
                    is_own = (file.metadata() or {}).get("identity") == self.identity
                    if is_own and tuple(features.get_shape()) == self.shape:
                        return symbols[row].long(), features[row]
            except (SafetensorError, OSError, KeyError):
                pass
            symbols, features = self._made(index)
            tensors = {"symbols": symbols.int().cpu(), "features": features.cpu().contiguous()}
            replace_file(path, partial(save_file, tensors, metadata={"identity": self.identity}))
        raise AssertionError(f"{path} was written and cannot be read")

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """All windows of one: (rows, window) int64, (rows, window, width)."""
        pairs = [self.row(index, row) for row in range(self.rows)]
        return torch.stack([symbols for symbols, _ in pairs]), torch.stack([features for _, features in pairs])

    def drop(self) -> None:
        """Delete all samples when the run is over."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        self.directory.rmdir()

    def _path(self, index: int) -> Path:
        return self.directory / f"sample-{index}.safetensors"

    def _made(self, index: int) -> tuple[Tensor, Tensor]:
        s = self.settings
        is_written, share = uniforms(s.seed, Purpose.WINDOWS, 1, 1, 2, index)[0]
        text = self.corpus.batch(s.seed, index, self.rows, s.window)
        if is_written > s.written:
            text = text.to(self.teacher.device)
            return text, torch.cat([self.teacher.read(part) for part in text.split(s.sequences)])
        longest = max(s.window // 2, SHORTEST_PROMPT)
        prompt = SHORTEST_PROMPT + int(share * (longest - SHORTEST_PROMPT))
        return self.teacher.write(text[:, :prompt], s.window, s.seed + index)


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


MAX_TEXT_BYTES = 1 << 30


def symbols_corpus(paths: Sequence[Path], directory: Path, manifest: Manifest, window: int) -> Corpus:
    """The files' text in the symbols of the checkpoint in `directory`, training and held-out apart.

    Each path as `load_corpus` takes it, each half at least `window` symbols long. The corpus' tensors are (symbols,)
    int32, or uint8 where symbols are bytes. Raises DataError, CheckpointError for a damaged tokenizer.
    """
    found = [load_corpus(path) for path in paths]
    if not found:
        raise DataError("give some text to distil on, in --text")
    name = ", ".join(corpus.name for corpus in found)
    train, valid = (torch.cat([getattr(corpus, half) for corpus in found]) for half in ("train", "valid"))
    if len(train) + len(valid) > MAX_TEXT_BYTES:
        raise DataError(f"{name}: more than {MAX_TEXT_BYTES >> 20} MB of text; give less of it")
    return in_symbols(Corpus(name, train, valid), directory, manifest, window)


def in_symbols(corpus: Corpus, directory: Path, manifest: Manifest, window: int) -> Corpus:
    """A text of bytes in the symbols of the checkpoint in `directory`; as `symbols_corpus`."""
    if manifest.tokenizer == "tokens":
        corpus = corpus.in_tokens(TextTokenizer(read_companion(directory, manifest, TOKENIZER_NAME).decode()))
    for what, half in (("training", corpus.train), ("held-out", corpus.valid)):
        if len(half) < window:
            raise DataError(
                f"{corpus.name}: the {what} text has {len(half)} {manifest.tokenizer}, and one window needs {window}; "
                "give more text, or a smaller window"
            )
    return corpus
