"""The router's own model, on its own machine: it drafts, and writes mode `local`."""

import asyncio
import math
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import grpc
import numpy as np

from serving.modes.drafters.passes import SharedPasses
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, tokenizer_id
from stages.backends.packed import PipelineRunner
from stages.backends.whole_model import WholeModel
from stages.checkpoint.bundle import find_bundle
from stages.clock import monotonic
from stages.errors import CheckpointError
from stages.limits import MAX_CANDIDATES
from stages.model.randomness import sample_tokens
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
            if due_at <= monotonic():
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
        begin, whole, vocabulary = monotonic(), text, self.model.vocabulary
        for position in range(vocabulary.count(text), vocabulary.count(text) + count):
            logits = self.shaping.adjusted(self.text.logits_after(whole), np.array(vocabulary.tokens(whole)))
            whole += sample_tokens(logits, self.temperature, self.seed, position, self.shaping)
        return whole[len(text) :], (monotonic() - begin) * 1000


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
