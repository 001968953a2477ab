"""A whole AR model in one process, for drafts: predicts what follows a text, and grows continuations of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stages.backends.attention import Growing, GrowingPiece
from stages.backends.base import CleanPiece
from stages.backends.packed import PipelineRunner
from stages.backends.packed_llama import packed_stage
from stages.backends.rows import product_threads
from stages.backends.runner_checks import load_runner
from stages.checkpoint.manifest import read_manifest
from stages.model.pipeline import cache_bytes, new_caches
from stages.model.prefill import split_reads
from stages.model.randomness import Purpose, uniforms
from stages.model.resampling import Candidates
from stages.model.scoring import Floats
from stages.model.vocabulary import Vocabulary


class WholeModel:
    """All stages of a model of any family, with the hosts' code. Its texts are for one thread only."""

    def __init__(self, directory: Path, threads: int | None = None) -> None:
        """:param threads: threads of products; by default as many as torch uses.

        Raises CheckpointError."""
        self.directory, self.manifest = directory, read_manifest(directory)
        self.threads = threads or torch.get_num_threads()
        self.architecture = a = self.manifest.text_architecture
        self.vocabulary, self.positions = Vocabulary(a.vocabulary), a.positions

    @cached_property
    def stages(self) -> list[PipelineRunner]:
        """The stages, loaded and checked on first use: a router may never need its own. Raises CheckpointError."""
        parts = range(self.architecture.parts)
        with product_threads(self.threads):
            return [load_runner(self.directory, i, packed_stage) for i in parts]  # in memory one at a time

    def open(self, capacity: int) -> ModelText:
        """Begin a text. capacity: most tokens to read of it."""
        return ModelText(self, capacity)

    def text_bytes(self, length: int) -> int:
        """Memory of a text, or of a continuation of `length` tokens on top of the text before it."""
        a = self.architecture
        return sum(cache_bytes(a.layers_in(part), a, length) for part in range(a.parts))

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (tokens, vocabulary) float64 for the token after each of `tokens` (tokens,) int64."""
        a, x = self.architecture, tokens
        for i, stage in enumerate(self.stages):
            (x,) = stage.read([CleanPiece(x, new_caches(a.layers_in(i), a, len(tokens)))])
        return self.stages[-1].next_byte([x])[0].double()

    def read(self, pieces: Sequence[tuple[ModelForks, NDArray[np.int64]]]) -> list[Tensor]:
        """`ModelForks.read` for several texts."""
        x = [torch.from_numpy(tokens) for _, tokens in pieces]
        texts = [forks.grown for forks, _ in pieces]
        for stage, grown in zip(self.stages, zip(*texts, strict=True), strict=True):
            x = stage.grow([GrowingPiece(*each) for each in zip(x, grown, strict=True)])
        return self.stages[-1].next_byte(x)

    @torch.inference_mode()
    def read_on(self, pieces: Sequence[KnownText]) -> list[None]:
        """`ModelText.read_on` for several texts."""
        for text, tokens in pieces:
            text.read_on(tokens)
        return [None for _ in pieces]

    @torch.inference_mode()
    def write(self, jobs: Sequence[Continuations]) -> list[None]:
        """Add a token to the continuations of several texts. If this fails, all of them begin again: the same random
        numbers draw the same tokens."""
        try:
            for job in jobs:
                job.open()
            logits, sharpness, u = (
                torch.cat([getattr(job, name) for job in jobs]) for name in ("logits", "sharpness", "u")
            )
            drawn, counts = draw_tokens(logits, sharpness, u), [job.count for job in jobs]
            for job, tokens, probs in zip(jobs, *(each.split(counts) for each in drawn), strict=True):
                job.add(tokens, probs)
            going = [job for job in jobs if not job.is_done]
            for job, after in zip(going, self.read([job.next for job in going]) if going else (), strict=True):
                job.logits = after
        except BaseException:
            for job in jobs:
                job.begin_again()
            raise
        return [None for _ in jobs]


class KnownText(NamedTuple):
    """The beginning of a text, in tokens; more will follow."""

    text: ModelText
    tokens: bytes


class ModelText:
    """A text read by a whole model."""

    def __init__(self, model: WholeModel, capacity: int) -> None:
        a, self.model, self.capacity = model.architecture, model, capacity
        self._caches = [new_caches(a.layers_in(part), a, capacity) for part in range(a.parts)]
        self._read = b""

    def logits_after(self, text: bytes) -> Tensor:
        """Logits (1, vocabulary) float32 for the token after `text`: encoded tokens, at least one.

        `text` may differ from the text read before: only the part from the first difference is read.
        """
        kept = self._go_back(text, 1)
        # after the prompt, any split gives the same bits: the lengths of runs depend on timing
        hidden = self._read_from(kept, text, at_once=not kept)
        return self.model.stages[-1].next_byte([hidden[-1:]])[0]

    def read_on(self, text: bytes) -> None:
        """Read the new part of `text`; more will follow."""
        if (kept := self._go_back(text)) < self.model.vocabulary.count(text):
            self._read_from(kept, text, at_once=True)

    def _read_from(self, kept: int, text: bytes, at_once: bool) -> Tensor:
        """Read after the first `kept` tokens. Returns hidden states of the last piece: (positions, width)."""
        vocabulary, x = self.model.vocabulary, torch.empty(0)
        for piece in split_reads(vocabulary.decode(vocabulary.cut(text, kept))):
            x = piece
            for stage, caches in zip(self.model.stages, self._caches, strict=True):
                x = stage.read([CleanPiece(x, caches, one_by_one=0 if at_once else len(x))])[0]
        self._read = text
        return x

    def fork(self, count: int, room: int) -> ModelForks:
        """Begin `count` continuations, of at most `room` tokens, of the last text given to `logits_after`.

        They are valid until it is called again.
        """
        return ModelForks(self.model, [Growing(caches, room, count) for caches in self._caches])

    def _go_back(self, text: bytes, again: int = 0) -> int:
        """Forget tokens that do not begin `text`. Returns the number of tokens that stay.

        :param again: this many last tokens are read again in any case."""
        vocabulary = self.model.vocabulary
        kept = min(vocabulary.count(self._read), vocabulary.count(text) - again)
        ours, theirs = (np.frombuffer(vocabulary.cut(each, 0, kept), np.uint8) for each in (self._read, text))
        if len(differ := np.flatnonzero(ours != theirs)):
            kept = int(differ[0]) // vocabulary.token_bytes
        for caches in self._caches:
            for cache in caches:
                cache.length = kept
        return kept


class ModelForks:
    """Continuations of one text that grow together, a token of each at a time."""

    def __init__(self, model: WholeModel, grown: list[Growing]) -> None:
        self.model, self.grown = model, grown

    def read(self, tokens: NDArray[np.int64]) -> Tensor:
        """Read the next token of each, (count,). Returns logits (count, vocabulary) for the token after it."""
        return self.model.read([(self, tokens)])[0]

    def select(self, branches: NDArray[np.int64]) -> None:
        """Keep these continuations, each any number of times. branches: indices."""
        for part in self.grown:
            part.select(torch.from_numpy(branches))


class ModelChain:
    """The only continuation of the last text given to `logits_after`, in the text's own caches: if it becomes the text,
    it is not read again."""

    def __init__(self, text: ModelText) -> None:
        self.text, self.known = text, text._read

    def read(self, tokens: NDArray[np.int64]) -> Tensor:
        self.known += self.text.model.vocabulary.encode(tokens)
        return self.text.logits_after(self.known)

    def select(self, branches: NDArray[np.int64]) -> None:
        pass


class Continuations:
    """Many continuations of one text in progress, a token of each per pass. The text itself is read, and kept, only
    once."""

    def __init__(
        self, text: ModelText, known: bytes, temperature: float, seed: int, length: int, count: int, first: int = 0
    ) -> None:
        """:param known: the text, in tokens.
        :param first: see `candidate_numbers`."""
        self.text, self.known, self.length, self.count = text, known, length, count
        self._numbers = partial(candidate_numbers, seed, text.model.vocabulary.count(known), length, count, first)
        self.sharpness = torch.full((count, 1), 1 / max(temperature, MIN_TEMPERATURE))
        self.logits = torch.empty(0)
        self._first: Tensor | None = None
        self._forks: ModelForks | None = None
        self._written = 0

    @property
    def is_done(self) -> bool:
        return self._written == self.length

    @property
    def u(self) -> Tensor:
        """Random numbers that draw the next token of each: (continuations, 1) float64."""
        return self._u[self._written]

    @property
    def next(self) -> tuple[ModelForks, NDArray[np.int64]]:
        """The forks that read, and the last tokens written."""
        assert self._forks is not None
        return self._forks, self._tokens[self._written - 1].numpy()[:, 0]

    def open(self) -> None:
        """Read the new part of the text, and allocate memory, unless already done."""
        if self._forks is None:
            shape = (self.length, self.count, 1)
            self._u = torch.from_numpy(self._numbers()).unsqueeze(2)
            self._tokens, self._probs = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
            if self._first is None:  # a second read might differ in the last bits
                self._first = self.text.logits_after(self.known).expand(self.count, -1)
            self.logits = self._first
            self._forks = self.text.fork(self.count, self.length)

    def add(self, tokens: Tensor, probs: Tensor) -> None:
        """Book a token of each continuation, and its probability: both (continuations, 1)."""
        self._tokens[self._written], self._probs[self._written] = tokens, probs
        self._written += 1

    def begin_again(self) -> None:
        self._forks, self._written = None, 0

    def candidates(self, compute_ms: float = 0.0) -> Candidates:
        """All candidates, once it `is_done`. This frees its memory."""
        self._forks = None
        tokens, probs = (each[..., 0].T.numpy() for each in (self._tokens, self._probs))
        texts = [self.text.model.vocabulary.encode(row) for row in tokens]
        return Candidates(texts, np.log(probs, dtype=np.float64), compute_ms)


# Drawing of candidates

# Probabilities processed together, whatever the vocabulary: 1 MB of float32.
DRAWN_AT_ONCE = 1 << 18
BLOCK = 256  # probabilities whose running sum is taken one by one; longer rows first sum such blocks
# Below this temperature the likeliest token gets all the probability: no logit divided by it overflows.
MIN_TEMPERATURE = 1e-30


def candidate_numbers(seed: int, position: int, length: int, count: int, first: int) -> Floats:
    """Random numbers in (0, 1] that draw the tokens of candidates from `position` on: (length, count).

    :param first: stream of the first candidate; each has its own."""
    streams = [uniforms(seed, Purpose.CANDIDATE, position, length, 1, first + i) for i in range(count)]
    return np.concatenate(streams, axis=1)


# Every operation works by row, or gives a number the same result at any place: a drawn token does not depend on the
# other rows.
def draw_tokens(logits: Tensor, sharpness: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row, and its probability: both (rows, 1).

    :param logits: (rows, vocabulary).
    :param sharpness: 1 / temperature, (rows, 1), at most 1 / MIN_TEMPERATURE.
    :param u: in (0, 1], (rows, 1) float64.
    """
    rows = max(1, DRAWN_AT_ONCE // logits.shape[1])
    if len(logits) > rows:
        parts = [draw_tokens(*each) for each in zip(*(x.split(rows) for x in (logits, sharpness, u)), strict=True)]
        tokens, probs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(probs)
    all_probs = (logits * sharpness).softmax(-1)
    chosen = _reached(all_probs, u)
    return chosen, all_probs.gather(1, chosen)


def _reached(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which a row's running sum reaches the share u of the total: (rows, 1), never one of share 0."""
    if probs.shape[1] > BLOCK:
        blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        sums = blocks.sum(2, dtype=torch.float64)
        below = sums.cumsum(1)
        reach = u * below[:, -1:]
        block = torch.searchsorted(below, reach)
        own = sums.gather(1, block)
        within = (reach - below.gather(1, block) + own) / own
        inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
        # rounding may put it just outside its block, by a last bit
        return block * BLOCK + _reached(inside, within.clamp(torch.finfo(torch.float64).tiny, 1))
    below = probs.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(below, u * below[:, -1:])
