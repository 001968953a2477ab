"""A small AR model as the router's own: the same weights and the same code as those of a host."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onesweep.serving.modes.drafters.base import LocalModel
from onesweep.serving.modes.tokenizer import tokenizer_id
from onesweep.stages.backends import drafting_runner
from onesweep.stages.backends.base import CleanPiece, Continuations, GrowingPiece
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.checkpoint import load_stage
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.model.draft_tree import Forks, LocalText
from onesweep.stages.model.pipeline import cache_bytes, new_caches
from onesweep.stages.model.prefill import split_reads
from onesweep.stages.model.vocabulary import Alphabet


class NeuralModel(LocalModel):
    """An AR model of any family, in one stage or several."""

    def __init__(self, directory: Path) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        manifest = read_manifest(directory)
        self.architecture = a = manifest.text_architecture
        self.stages = [drafting_runner(load_stage(directory, i)) for i in range(a.parts)]
        super().__init__(Alphabet(a.vocabulary), tokenizer_id(manifest), manifest.digest(), a.positions)

    def open(self, capacity: int) -> LocalText:
        return _NeuralText(self, capacity)

    def branch_bytes(self, length: int) -> int:
        a = self.architecture
        return sum(cache_bytes(a.layers_in(part), a, length) for part in range(a.parts))

    def read(self, pieces: Sequence[tuple[Forks, NDArray[np.int64]]]) -> list[Tensor]:
        x = [torch.from_numpy(symbols) for _, symbols in pieces]
        texts = [cast(_NeuralForks, forks).grown for forks, _ in pieces]
        for stage, grown in zip(self.stages, zip(*texts, strict=True), strict=True):
            x = stage.grow([GrowingPiece(*each) for each in zip(x, grown, strict=True)])
        return self.stages[-1].next_byte(x)


def read_local_model(directory: Path) -> NeuralModel | None:
    """The drafter of a bundle or a checkpoint, if it has one. Blocks. Raises OnesweepError for one that is damaged."""
    local = find_bundle(directory).local
    return NeuralModel(local) if local else None


class _NeuralText(LocalText):
    """Its caches hold what was read."""

    def __init__(self, model: NeuralModel, capacity: int) -> None:
        a, self.model = model.architecture, model
        self._caches = [new_caches(a.layers_in(part), a, capacity) for part in range(a.parts)]
        self._read = b""

    def logits_after(self, text: bytes) -> Tensor:
        alphabet, stages = self.model.alphabet, self.model.stages
        kept = self._go_back(text)
        for piece in split_reads(alphabet.decode(alphabet.cut(text, kept))):
            x = piece
            for stage, caches in zip(stages, self._caches, strict=True):
                # what follows the prompt gives the same odds in any pieces: how long runs are depends on the time
                x = stage.read([CleanPiece(x, caches, one_by_one=len(x) if kept else 0)])[0]
        self._read = text
        return stages[-1].next_byte([x[-1:]])[0]

    def fork(self, count: int, room: int) -> Forks:
        grown = [stage.fork(caches, room, count) for stage, caches in zip(self.model.stages, self._caches, strict=True)]
        return _NeuralForks(self.model, grown)

    def _go_back(self, text: bytes) -> int:
        """Forget what is not the beginning of `text`, and its last symbol: that one is read to go on. How many stay."""
        alphabet = self.model.alphabet
        kept = min(alphabet.count(self._read), alphabet.count(text) - 1)
        ours, theirs = (np.frombuffer(alphabet.cut(each, 0, kept), np.uint8) for each in (self._read, text))
        if len(differ := np.flatnonzero(ours != theirs)):
            kept = int(differ[0]) // alphabet.symbol_bytes
        for caches in self._caches:
            for cache in caches:
                cache.length = kept
        return kept


class _NeuralForks(Forks):
    def __init__(self, model: NeuralModel, grown: list[Continuations]) -> None:
        self.model, self.grown = model, grown

    def read(self, symbols: NDArray[np.int64]) -> Tensor:
        return self.model.read([(self, symbols)])[0]

    def select(self, branches: NDArray[np.int64]) -> None:
        for part in self.grown:
            part.select(torch.from_numpy(branches))
