"""The router's own model, on its own machine: it drafts, and writes modes `local` and `local:copy` without a sweep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property
from pathlib import Path

import numpy as np

from serving.modes import COPY, NO_COPY
from serving.modes.base import Generation, Mode
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers, tokenizer_id
from serving.router.accounting import Account
from stages.backends.packed import PipelineRunner
from stages.backends.whole_model import Continuations, WholeModel
from stages.checkpoint.bundle import find_bundle
from stages.clock import monotonic
from stages.errors import CheckpointError
from stages.limits import MAX_CANDIDATES
from stages.model.randomness import sample_tokens
from stages.model.resampling import Candidates
from stages.model.scoring import MAX_LOGITS, PLAIN, Shaping
from stages.wire.status import StatusError, deadline_exceeded, failed_precondition

# Written before other requests get a turn.
TOKENS_PER_TURN = 8


class LocalModel(WholeModel):
    """The router's own copy of a small model. It computes on a thread of its own."""

    # Of the caches of all continuations that are written together, for one request or for many. With two layers of
    # width 128, one of 256 tokens takes 0.5 MB, so 512 fit.
    max_draft_bytes = 256 << 20

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError."""
        super().__init__(directory)
        # The `Tokenizer.id` of its tokens, and the name of the model.
        self.tokenizer_id, self.digest = tokenizer_id(self.manifest), self.manifest.digest()
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="local")

    @cached_property
    def stages(self) -> list[PipelineRunner]:
        """As of any model. Raises StatusError: the first request finds out."""
        try:
            return super().stages
        except CheckpointError as error:
            words = f"the router cannot load its own model: {error}"
            raise failed_precondition(words) from None

    def most_branches(self, length: int) -> int:
        """Continuations of `length` tokens that a request may have written together."""
        fit = self.max_draft_bytes // max(self.text_bytes(length), 1)
        return min(fit, MAX_CANDIDATES, MAX_LOGITS // self.vocabulary.size)

    async def draft(self, written: Continuations, due_at: float) -> Candidates:
        """All of it, before other requests get a turn. Raises StatusError at the deadline, by the monotonic clock."""
        gone = threading.Event()

        def write() -> Candidates:
            begin = monotonic()
            while not written.is_done:
                if gone.is_set() or due_at <= monotonic():
                    raise late()
                self.write([written])
            return written.candidates((monotonic() - begin) * 1000)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.compute, write)
        finally:
            gone.set()

    async def generate(
        self, prompt: bytes, max_tokens: int, temperature: float, seed: int, due_at: float, shaping: Shaping = PLAIN
    ) -> AsyncGenerator[tuple[bytes, float], None]:
        """(tokens, compute milliseconds) pieces. Raises StatusError when the deadline passes."""
        first, loop = self.vocabulary.count(prompt), asyncio.get_running_loop()
        text, known = self.open(first + max_tokens), prompt

        def turn(begin: int, end: int) -> tuple[bytes, float]:
            began, whole = monotonic(), known
            for position in range(begin, end):
                logits = shaping.adjusted(text.logits_after(whole), np.array(self.vocabulary.tokens(whole)))
                whole += sample_tokens(logits, temperature, seed, position, shaping)
            return whole[len(known) :], (monotonic() - began) * 1000

        for begin in range(first, first + max_tokens, TOKENS_PER_TURN):
            if due_at <= monotonic():
                raise late()
            end = min(begin + TOKENS_PER_TURN, first + max_tokens)
            piece, compute_ms = await loop.run_in_executor(self.compute, turn, begin, end)
            yield piece, compute_ms
            known += piece


def late() -> StatusError:
    return deadline_exceeded("the deadline of this request has passed")


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
        f"the router has no drafter that writes the hosts' tokens{why}: import the model with --drafter copy:q8, and "
        "start the router with that checkpoint"
    )


def read_local_model(directory: Path) -> LocalModel | None:
    """The drafter of a bundle or a checkpoint, if it has one. Blocks. Raises OnesweepError for one that is damaged."""
    local = find_bundle(directory).local
    return LocalModel(local) if local else None


# A sweep must beat these on quality.


class LocalMode(Mode):
    """Zero sweeps, by a small model."""

    name = "local"
    uses_hosts = False
    absent = (
        "the router has no local model (a copy of the hosts' is mode local:copy): start it with a checkpoint that "
        "has local/, which `onesweep import --drafter MODEL` makes of a smaller one"
    )

    def __init__(self, model: LocalModel | None, tokenizers: Tokenizers) -> None:
        self.model, self.tokenizers = model, tokenizers

    @property
    def problem(self) -> str:
        return "" if self.model else self.absent

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.of(self.model.digest) if self.model else BYTE_TOKENIZER

    @property
    def positions(self) -> int:
        return self.model.positions if self.model else 0

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        assert self.model is not None
        turns = self.model.generate(
            request.prompt, request.max_tokens, request.temperature, request.seed, request.due_at, request.shaping
        )
        async with aclosing(turns):
            async for text, compute_ms in turns:
                account.local_compute_ms += compute_ms
                piece, ended = request.until_end(text, self.tokenizer.vocabulary)
                account.add_text(piece)
                yield piece
                if ended:
                    return


class CopyMode(LocalMode):
    """Zero sweeps, by the hosts' own model in fewer bits: what its holder would have without them."""

    name = COPY
    absent = NO_COPY
