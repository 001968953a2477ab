"""The router's own model, on its own machine: it drafts, and writes mode `local`."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.modes.drafters.passes import SharedPasses
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, tokenizer_id
from stages.backends import packed_stage
from stages.backends.base import CleanPiece
from stages.backends.packed import Growing, GrowingPiece
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import read_manifest
from stages.limits import MAX_CANDIDATES
from stages.model.draft_tree import Forks, LocalText
from stages.model.pipeline import cache_bytes, new_caches
from stages.model.prefill import split_reads
from stages.model.randomness import sample_tokens
from stages.model.scoring import MAX_LOGITS, PLAIN, Shaping
from stages.model.vocabulary import Vocabulary
from stages.wire.status import StatusError

# Written before other requests get a turn.
TOKENS_PER_TURN = 8


class LocalModel:
    """A small AR model of any family, which says what follows a text without the hosts: the same weights and the same
    code as those of a host. It computes on a thread of its own."""

    # Of the caches of all continuations that are written together, for one request or for many. With two layers of
    # width 128, one of 256 tokens takes 0.5 MB, so 512 fit.
    max_draft_bytes = 256 << 20

    def __init__(self, directory: Path) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        manifest = read_manifest(directory)
        self.architecture = a = manifest.text_architecture
        self.stages = [packed_stage(load_stage(directory, i)) for i in range(a.parts)]
        self.vocabulary, self.positions = Vocabulary(a.vocabulary), a.positions
        # The `Tokenizer.id` of its tokens, and the name of the model.
        self.tokenizer_id, self.digest = tokenizer_id(manifest), manifest.digest()
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="local")
        self.passes = SharedPasses(self, self.compute)

    def open(self, capacity: int) -> LocalText:
        """Begin a text. capacity: most tokens of it that are read."""
        return _NeuralText(self, capacity)

    def branch_bytes(self, length: int) -> int:
        """Memory that a continuation of `length` tokens takes beside the text before it."""
        a = self.architecture
        return sum(cache_bytes(a.layers_in(part), a, length) for part in range(a.parts))

    def most_branches(self, length: int) -> int:
        """Continuations of `length` tokens that a request may have written together."""
        fit = self.max_draft_bytes // max(self.branch_bytes(length), 1)
        return min(fit, MAX_CANDIDATES, MAX_LOGITS // self.vocabulary.size)

    def read(self, pieces: Sequence[tuple[Forks, NDArray[np.int64]]]) -> list[Tensor]:
        """`Forks.read` of several texts. On the compute thread only."""
        x = [torch.from_numpy(tokens) for _, tokens in pieces]
        texts = [cast(_NeuralForks, forks).grown for forks, _ in pieces]
        for stage, grown in zip(self.stages, zip(*texts, strict=True), strict=True):
            x = stage.grow([GrowingPiece(*each) for each in zip(x, grown, strict=True)])
        return self.stages[-1].next_byte(x)

    async def generate(
        self, prompt: bytes, max_tokens: int, temperature: float, seed: int, due_at: float, shaping: Shaping = PLAIN
    ) -> AsyncGenerator[tuple[bytes, float], None]:
        """(tokens, compute milliseconds) pieces. Raises StatusError when the deadline passes."""
        sequence = LocalSequence(self, self.vocabulary.count(prompt) + max_tokens, temperature, seed, shaping=shaping)
        text, left = prompt, max_tokens
        while left:
            if due_at <= time.monotonic():
                raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
            count = min(TOKENS_PER_TURN, left)
            piece, compute_ms = await sequence.after(text, count)
            yield piece, compute_ms
            text, left = text + piece, left - count


class LocalSequence:
    """One text that a local model writes on, with the numbers of one request."""

    def __init__(
        self,
        model: LocalModel,
        capacity: int,
        temperature: float,
        seed: int,
        due_at: float = math.inf,
        shaping: Shaping = PLAIN,
    ) -> None:
        """:param capacity: most tokens that are read.
        :param due_at: by the monotonic clock, after which candidates are no longer written.
        :param shaping: of what is drawn token by token."""
        self.model, self.temperature, self.seed, self.due_at = model, temperature, seed, due_at
        self.shaping = shaping
        self.text = model.open(capacity)

    async def after(self, text: bytes, count: int) -> tuple[bytes, float]:
        """`count` tokens sampled after `text`, and the milliseconds that they took."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.model.compute, self._write, text, count)

    def _write(self, text: bytes, count: int) -> tuple[bytes, float]:
        begin, whole, vocabulary = time.perf_counter(), text, self.model.vocabulary
        for position in range(vocabulary.count(text), vocabulary.count(text) + count):
            logits = self.shaping.adjusted(self.text.logits_after(whole), np.array(vocabulary.tokens(whole)))
            whole += sample_tokens(logits, self.temperature, self.seed, position, self.shaping)
        return whole[len(text) :], (time.perf_counter() - begin) * 1000


def drafter_problem(model: LocalModel | None, tokenizer: Tokenizer) -> str:
    """Why the router's own model does not draft for the hosts' model, whose tokenizer this is; empty where it does."""
    why = ""
    if model is not None:
        if model.vocabulary != tokenizer.vocabulary:
            why = f" (its model has {model.vocabulary.size} tokens and the hosts' model {tokenizer.vocabulary.size})"
        elif model.tokenizer_id != tokenizer.id:
            why = " (its model has another tokenizer than the hosts' model)"
        else:
            return ""
    if tokenizer is BYTE_TOKENIZER:
        return f"the router has no drafter that writes bytes{why}: start it with a bundle that has local/"
    return (
        f"the router has no drafter that writes the hosts' tokens{why}: make one with `onesweep distill`, and start "
        "the router with that checkpoint"
    )


def read_local_model(directory: Path) -> LocalModel | None:
    """The drafter of a bundle or a checkpoint, if it has one. Blocks. Raises OnesweepError for one that is damaged."""
    local = find_bundle(directory).local
    return LocalModel(local) if local else None


class _NeuralText(LocalText):
    def __init__(self, model: LocalModel, capacity: int) -> None:
        a, self.model = model.architecture, model
        self._caches = [new_caches(a.layers_in(part), a, capacity) for part in range(a.parts)]
        self._read = b""

    def logits_after(self, text: bytes) -> Tensor:
        vocabulary, stages = self.model.vocabulary, self.model.stages
        kept = self._go_back(text)
        for piece in split_reads(vocabulary.decode(vocabulary.cut(text, kept))):
            x = piece
            for stage, caches in zip(stages, self._caches, strict=True):
                # what follows the prompt gives the same bits in any pieces: how long runs are depends on the time
                x = stage.read([CleanPiece(x, caches, one_by_one=len(x) if kept else 0)])[0]
        self._read = text
        return stages[-1].next_byte([x[-1:]])[0]

    def fork(self, count: int, room: int) -> Forks:
        grown = [stage.fork(caches, room, count) for stage, caches in zip(self.model.stages, self._caches, strict=True)]
        return _NeuralForks(self.model, grown)

    def _go_back(self, text: bytes) -> int:
        """Forget what is not the beginning of `text`, and its last token: that one is read to go on. How many stay."""
        vocabulary = self.model.vocabulary
        kept = min(vocabulary.count(self._read), vocabulary.count(text) - 1)
        ours, theirs = (np.frombuffer(vocabulary.cut(each, 0, kept), np.uint8) for each in (self._read, text))
        if len(differ := np.flatnonzero(ours != theirs)):
            kept = int(differ[0]) // vocabulary.token_bytes
        for caches in self._caches:
            for cache in caches:
                cache.length = kept
        return kept


class _NeuralForks(Forks):
    def __init__(self, model: LocalModel, grown: list[Growing]) -> None:
        self.model, self.grown = model, grown

    def read(self, tokens: NDArray[np.int64]) -> Tensor:
        return self.model.read([(self, tokens)])[0]

    def select(self, branches: NDArray[np.int64]) -> None:
        for part in self.grown:
            part.select(torch.from_numpy(branches))
