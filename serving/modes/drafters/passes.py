"""Continuations of several requests, written together: each pass of the model gives the next token of all of them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stages.clock import monotonic
from stages.wire.status import StatusError

if TYPE_CHECKING:
    from serving.modes.drafters.local_model import LocalModel
    from stages.backends.whole_model import ModelForks, ModelText

# Probabilities that are looked at together, whatever the vocabulary: 1 MB of float32.
DRAWN_AT_ONCE = 1 << 18
# Probabilities whose running sum is taken one by one; of a larger vocabulary that of blocks of so many comes first.
# For 16 rows of 49,152 that takes 0.1 ms instead of 11.
BLOCK = 256
# Temperature below which the likeliest token takes all: no logit divided by it overflows.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Written:
    """Continuations of one text."""

    tokens: NDArray[np.int64]  # (continuations, length)
    # Of each token, where it was drawn, above 0: (continuations, length).
    probs: NDArray[np.float32]
    # The request's part of the passes, by rows.
    compute_ms: float


class DraftJob:
    """Continuations of one text under way."""

    def __init__(
        self,
        text: ModelText,
        known: bytes,
        temperature: float,
        numbers: Callable[[], NDArray[np.float64]],
        due_at: float = math.inf,
        cache_bytes: int = 0,
    ) -> None:
        """:param known: the text.
        :param numbers: makes the uniform ones in (0, 1] that draw the tokens, (length, continuations); on the compute
            thread, since they take a while.
        :param cache_bytes: memory that the continuations take beside the text."""
        self.text, self.known, self.numbers, self.due_at = text, known, numbers, due_at
        self.cache_bytes = cache_bytes
        self.done = Future[Written]()
        self._sharpness = 1 / max(temperature, LEAST_TEMPERATURE)
        self._forks: ModelForks | None = None
        self._compute_ms, self._length = 0.0, 0
        # A pass that it shared failed: no other takes part in its next ones.
        self.alone = False

    def has_ended(self) -> bool:
        """True if it is done, or was cancelled; its deadline ends it here."""
        if self.due_at <= monotonic():
            self.fail(StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed"))
        return self.done.done()

    def open(self) -> bool:
        """Read the text, if that was not done; False where this request goes no further."""
        try:
            if self._forks is None:
                self._open()
        except Exception as error:
            self.fail(error)
        return not self.done.done()

    def _open(self) -> None:
        begin, u = monotonic(), self.numbers()
        length, count = u.shape
        self._u, self.sharpness = torch.from_numpy(u).unsqueeze(2), torch.full((count, 1), self._sharpness)
        self._tokens, self._probs = torch.empty(length, count, 1, dtype=torch.int64), torch.empty(length, count, 1)
        self.logits = self.text.logits_after(self.known).expand(count, -1)
        self._forks = self.text.fork(count, length)
        self._compute_ms += (monotonic() - begin) * 1000

    @property
    def u(self) -> Tensor:
        """Numbers that draw the next token: (continuations, 1) float64."""
        return self._u[self._length]

    @property
    def next(self) -> tuple[ModelForks, NDArray[np.int64]]:
        """The tokens that were written last, and what reads them."""
        assert self._forks is not None
        return self._forks, self._tokens[self._length - 1].numpy()[:, 0]

    def add(self, tokens: Tensor, probs: Tensor) -> bool:
        """Book a token of each continuation: (continuations, 1) both. True where more are to come."""
        self._tokens[self._length], self._probs[self._length] = tokens, probs
        self._length += 1
        return self._length < len(self._u)

    def took(self, ms: float) -> None:
        """Book its part of a pass, and end if all is written."""
        self._compute_ms += ms
        if self._length < len(self._u):
            return
        self._forks = None  # the next job has its memory
        # False for a request that was cancelled meanwhile
        if self.done.set_running_or_notify_cancel():
            tokens, probs = (each[..., 0].T.numpy() for each in (self._tokens, self._probs))
            self.done.set_result(Written(tokens, probs, self._compute_ms))

    def begin_alone(self) -> None:
        """Write all of it again, with no other: the same numbers draw the same tokens."""
        self._forks, self._length, self.alone = None, 0, True

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

    async def draft(self, job: DraftJob) -> Written:
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
        try:
            if ready := [job for job in jobs if job.open()]:
                self._pass(ready)
        except Exception as error:
            for job in jobs:
                if len(jobs) > 1:
                    job.begin_alone()
                else:
                    job.fail(error)
        self.thread.submit(self._turn)

    def _with_memory(self) -> list[DraftJob]:
        """The oldest jobs, as many as fit together. One at least: what does not fit alone was refused."""
        if self._jobs and self._jobs[0].alone:
            return self._jobs[:1]
        ends = accumulate(job.cache_bytes for job in self._jobs)
        fit = sum(end <= self.model.max_draft_bytes for end in ends)
        return [job for job in self._jobs[: max(fit, 1)] if not job.alone]

    @torch.inference_mode()
    def _pass(self, jobs: Sequence[DraftJob]) -> None:
        begin, counts = monotonic(), [len(job.sharpness) for job in jobs]
        logits, sharpness = _joined([job.logits for job in jobs]), _joined([job.sharpness for job in jobs])
        tokens, probs = draw(logits, sharpness, _joined([job.u for job in jobs]))
        drawn = zip(jobs, tokens.split_with_sizes(counts), probs.split_with_sizes(counts), strict=True)
        going = [job for job, *pair in drawn if job.add(*pair)]
        if going:
            for job, after in zip(going, self.model.read([job.next for job in going]), strict=True):
                job.logits = after
        ms = (monotonic() - begin) * 1000
        for job, count in zip(jobs, counts, strict=True):
            job.took(ms * count / sum(counts))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# Every operation is one of rows, or gives the same for a number wherever it stands: what is drawn does not depend on
# the rows beside it.
def draw(logits: Tensor, sharpness: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row, and its probability: (rows, 1) both.

    :param logits: (rows, vocabulary).
    :param sharpness: 1 / temperature, (rows, 1), at most 1 / LEAST_TEMPERATURE.
    :param u: in (0, 1], (rows, 1) float64.
    """
    rows = max(1, DRAWN_AT_ONCE // logits.shape[1])
    if len(logits) > rows:
        parts = [draw(*each) for each in zip(*(x.split(rows) for x in (logits, sharpness, u)), strict=True)]
        tokens, probs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(probs)
    all_probs = (logits * sharpness).softmax(-1)
    chosen = _reached(all_probs, u)
    return chosen, all_probs.gather(1, chosen)


def _reached(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the running sum of a row reaches the share u of the whole: (rows, 1), never of a share 0."""
    if probs.shape[1] > BLOCK:
        blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        sums = blocks.sum(2, dtype=torch.float64)
        below = sums.cumsum(1)
        reach = u * below[:, -1:]
        block = torch.searchsorted(below, reach)
        own = sums.gather(1, block)
        within = (reach - below.gather(1, block) + own) / own
        inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
        # rounding may put it a last bit outside of its block
        return block * BLOCK + _reached(inside, within.clamp(torch.finfo(torch.float64).tiny, 1))
    below = probs.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(below, u * below[:, -1:])
