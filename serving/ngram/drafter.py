"""The n-gram model as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.local import Forks, LocalModel, LocalText
from serving.ngram.model import NgramModel
from serving.ngram.store import read_ngrams
from stages.alphabet import Alphabet
from stages.checkpoint import file_digest

ANY_LENGTH = 1 << 31
"""It looks at a text's end only, however long that is."""


class NgramDrafter(LocalModel):
    """Drafts what followed the last few symbols in the text that it was fitted to."""

    def __init__(self, path: Path, vocabulary: int, tokenizer: str) -> None:
        """:param vocabulary: and :param tokenizer: those of the hosts' model. Raises CheckpointError."""
        self.model = NgramModel(read_ngrams(path, vocabulary, tokenizer))
        super().__init__(Alphabet(vocabulary), tokenizer, file_digest(path), ANY_LENGTH)

    def open(self, capacity: int) -> LocalText:
        return _NgramText(self)

    def logits(self, endings: Sequence[Sequence[int]]) -> Tensor:
        """ln of the odds after texts with these endings: (endings, vocabulary) float32."""
        rows = [self.model.probabilities(ending) for ending in endings]
        return torch.from_numpy(np.log(np.stack(rows)).astype(np.float32))


class _NgramText(LocalText):
    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter, self._ending = drafter, list[int]()

    def logits_after(self, text: bytes) -> Tensor:
        alphabet, most = self.drafter.alphabet, self.drafter.model.ngrams.order - 1
        self._ending = alphabet.symbols(alphabet.cut(text, max(alphabet.count(text) - most, 0)))
        return self.drafter.logits([self._ending])

    def fork(self, count: int, room: int) -> Forks:
        return _NgramForks(self.drafter, [self._ending] * count)


class _NgramForks(Forks):
    def __init__(self, drafter: NgramDrafter, endings: list[list[int]]) -> None:
        self.drafter, self._endings = drafter, endings

    def read(self, symbols: NDArray[np.int64]) -> Tensor:
        most = self.drafter.model.ngrams.order - 1
        grown = zip(self._endings, symbols.tolist(), strict=True)
        self._endings = [[*ending, symbol][-most:] for ending, symbol in grown]
        return self.drafter.logits(self._endings)

    def select(self, branches: NDArray[np.int64]) -> None:
        self._endings = [self._endings[branch] for branch in branches.tolist()]
