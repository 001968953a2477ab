"""Models on the router's own machine: what drafts, whatever it is and whatever its symbols are."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onesweep.serving.modes.drafters.passes import SharedPasses
from onesweep.serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer
from onesweep.stages.limits import MAX_CANDIDATES
from onesweep.stages.model.draft_tree import Forks, LocalText
from onesweep.stages.model.randomness import sample_symbols
from onesweep.stages.model.scoring import MAX_LOGITS
from onesweep.stages.model.shaping import PLAIN, Shaping
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.wire.status import StatusError

# Written before other requests get a turn.
SYMBOLS_PER_TURN = 8


class LocalModel(ABC):
    """Says what follows a text, without the hosts. It computes on a thread of its own."""

    # Of the caches of all continuations that are written together, for one request or for many. With two layers of
    # width 128, one of 256 symbols takes 0.5 MB, so 512 fit.
    max_draft_bytes = 256 << 20

    def __init__(self, alphabet: Alphabet, tokenizer_id: str, digest: str, positions: int) -> None:
        """:param tokenizer_id: the `Tokenizer.id` of its symbols.
        :param digest: names the model.
        :param positions: most symbols of a text."""
        self.alphabet, self.tokenizer_id, self.digest, self.positions = alphabet, tokenizer_id, digest, positions
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="local")
        self.passes = SharedPasses(self, self.compute)

    @abstractmethod
    def open(self, capacity: int) -> LocalText:
        """Begin a text. capacity: most symbols of it that are read."""

    def branch_bytes(self, length: int) -> int:
        """Memory that a continuation of `length` symbols takes beside the text before it."""
        return 0

    def most_branches(self, length: int) -> int:
        """Continuations of `length` symbols that a request may have written together."""
        fit = self.max_draft_bytes // max(self.branch_bytes(length), 1)
        return min(fit, MAX_CANDIDATES, MAX_LOGITS // self.alphabet.size)

    def read(self, pieces: Sequence[tuple[Forks, NDArray[np.int64]]]) -> list[Tensor]:
        """`Forks.read` of several texts. On the compute thread only."""
        return [forks.read(symbols) for forks, symbols in pieces]

    async def generate(
        self, prompt: bytes, max_symbols: int, temperature: float, seed: int, due_at: float, shaping: Shaping = PLAIN
    ) -> AsyncGenerator[tuple[bytes, float], None]:
        """(symbols, compute milliseconds) pieces. Raises Refusal when the deadline passes."""
        sequence = LocalSequence(self, self.alphabet.count(prompt) + max_symbols, temperature, seed, shaping=shaping)
        text, left = prompt, max_symbols
        while left:
            if due_at <= time.monotonic():
                raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
            count = min(SYMBOLS_PER_TURN, left)
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
        """:param capacity: most symbols that are read.
        :param due_at: by the monotonic clock, after which candidates are no longer written.
        :param shaping: of what is drawn symbol by symbol."""
        self.model, self.temperature, self.seed, self.due_at = model, temperature, seed, due_at
        self.shaping = shaping
        self.text = model.open(capacity)

    async def after(self, text: bytes, count: int) -> tuple[bytes, float]:
        """`count` symbols sampled after `text`, and the milliseconds that they took."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.model.compute, self._write, text, count)

    def _write(self, text: bytes, count: int) -> tuple[bytes, float]:
        begin, whole, alphabet = time.perf_counter(), text, self.model.alphabet
        for position in range(alphabet.count(text), alphabet.count(text) + count):
            logits = self.shaping.adjusted(self.text.logits_after(whole), np.array(alphabet.symbols(whole)))
            whole += sample_symbols(logits, self.temperature, self.seed, position, self.shaping)
        return whole[len(text) :], (time.perf_counter() - begin) * 1000


def drafter_problem(model: LocalModel | None, tokenizer: Tokenizer) -> str:
    """Why the router's own model does not draft for the hosts' model, whose tokenizer this is; empty where it does."""
    why = ""
    if model is not None:
        if model.alphabet != tokenizer.alphabet:
            why = f" (its model has {model.alphabet.size} symbols and the hosts' model {tokenizer.alphabet.size})"
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
