"""The router's own model, on its own machine: it drafts, and writes mode `local`."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import grpc
import numpy as np

from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, tokenizer_id
from stages.backends.packed import PipelineRunner
from stages.backends.whole_model import Continuations, WholeModel
from stages.checkpoint.bundle import find_bundle
from stages.errors import CheckpointError
from stages.limits import MAX_CANDIDATES
from stages.model.randomness import sample_tokens
from stages.model.resampling import Candidates
from stages.model.scoring import MAX_LOGITS, PLAIN, Shaping
from stages.wire.status import StatusError

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
        self.passes = SharedPasses(self, self.compute)

    @cached_property
    def stages(self) -> list[PipelineRunner]:
        """As of any model. Raises StatusError: the first request finds out."""
        try:
            return super().stages
        except CheckpointError as error:
            words = f"the router cannot load its own model: {error}"
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, words) from None

    def most_branches(self, length: int) -> int:
        """Continuations of `length` tokens that a request may have written together."""
        fit = self.max_draft_bytes // max(self.text_bytes(length), 1)
        return min(fit, MAX_CANDIDATES, MAX_LOGITS // self.vocabulary.size)

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


# Continuations of several requests, written together: each pass of the model gives the next token of all of them.


class DraftJob:
    """Continuations of one text for a request."""

    def __init__(self, written: Continuations, due_at: float = math.inf, cache_bytes: int = 0) -> None:
        """:param cache_bytes: memory that the continuations take beside the text."""
        self.written, self.due_at, self.cache_bytes = written, due_at, cache_bytes
        self.done = Future[Candidates]()
        self._compute_ms = 0.0
        # A pass that it shared failed: no other takes part in its next ones.
        self.alone = False

    def has_ended(self) -> bool:
        """True if it is done, or was cancelled; its deadline ends it here."""
        if self.due_at <= time.monotonic():
            self.fail(StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed"))
        return self.done.done()

    def took(self, ms: float) -> None:
        """Book its part of a pass, and end if all is written."""
        self._compute_ms += ms
        # False for a request that was cancelled meanwhile
        if self.written.is_done and self.done.set_running_or_notify_cancel():
            self.done.set_result(self.written.candidates(self._compute_ms))

    def fail(self, error: Exception) -> None:
        """End without a result."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class SharedPasses:
    """Takes in each turn every job that wants a next token. Only a job that finds no memory waits, for those before.

    A turn is one job of the model's compute thread: what else there is to do comes in between.
    """

    def __init__(self, model: LocalModel, thread: Executor) -> None:
        self.model, self.thread = model, thread
        # in the order in which they came, which is that in which they get their memory
        self._lock, self._jobs, self._is_running = threading.Lock(), list[DraftJob](), False

    @property
    def busy(self) -> bool:
        """True while anything is being written."""
        return self._is_running

    async def draft(self, job: DraftJob) -> Candidates:
        """All of it. A job that is cancelled leaves before the next pass. Raises StatusError at the deadline."""
        with self._lock:
            self._jobs.append(job)
            starts, self._is_running = not self._is_running, True
        if starts:
            self.thread.submit(self._turn)
        return await asyncio.wrap_future(job.done)

    def _turn(self) -> None:
        with self._lock:
            self._jobs = [job for job in self._jobs if not job.has_ended()]
            # of this turn: a job that comes meanwhile waits for the next, and has no part in a fault of this one
            jobs = self._with_memory()
            self._is_running = bool(jobs)
        if not jobs:
            return
        begin, rows = time.perf_counter(), sum(job.written.count for job in jobs)
        try:
            self.model.write([job.written for job in jobs])
        except Exception as error:
            for job in jobs:
                job.alone = True
                if len(jobs) == 1:
                    job.fail(error)
        else:
            ms = (time.perf_counter() - begin) * 1000
            for job in jobs:
                job.took(ms * job.written.count / rows)
        self.thread.submit(self._turn)

    def _with_memory(self) -> list[DraftJob]:
        """The oldest jobs, as many as fit together. One at least: what does not fit alone was refused."""
        if self._jobs and self._jobs[0].alone:
            return self._jobs[:1]
        ends = accumulate(job.cache_bytes for job in self._jobs)
        fit = sum(end <= self.model.max_draft_bytes for end in ends)
        return [job for job in self._jobs[: max(fit, 1)] if not job.alone]


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
