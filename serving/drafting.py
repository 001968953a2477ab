"""Guessing what the AR pipeline will write next, so that one sweep can confirm several symbols."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from serving.local import LocalSequence
from stages.alphabet import BYTES, Alphabet

MAX_DRAFT = 32
MAX_RUN = 64
"""Most that is guessed at once where a refused guess is all that ends a run."""
RUN_ENDS = 0.99
"""A run is made so long that a guess of it is refused with this probability: then a longer one saves no trip."""
MIN_MATCH, MAX_MATCH = 4, 24
"""Bytes that must have been seen before to expect the same continuation, and most that are looked for."""
MIN_TOKENS, MAX_TOKENS = 2, 8
"""The same in tokens, each of which is several bytes."""
SURE_MATCH = 8
"""A match of so many bytes is trusted over a model."""
FORGET = 0.98
"""Weight of what was measured, at each further round."""


class Drafter(ABC):
    """Guesses symbols for one request. Texts are in their encoding."""

    @abstractmethod
    async def draft(self, text: bytes, count: int) -> tuple[bytes, float]:
        """At most `count` guesses after `text`, and the milliseconds of arithmetic that they took."""


class ModelDrafter(Drafter):
    """The router's small AR model, sampling with the request's own random numbers.

    Where both models agree on the odds they then pick the same byte, however random it is (Gumbel coupling:
    Daliri et al. 2024, arXiv 2408.07978).
    """

    def __init__(self, sequence: LocalSequence) -> None:
        self.sequence = sequence

    async def draft(self, text: bytes, count: int) -> tuple[bytes, float]:
        return await self.sequence.after(text, count) if count else (b"", 0.0)


class LookupDrafter(Drafter):
    """What followed the last time that the text ended like this."""

    def __init__(self, alphabet: Alphabet = BYTES, min_match: int | None = None) -> None:
        self.alphabet = alphabet
        least, self.most = (MIN_MATCH, MAX_MATCH) if alphabet == BYTES else (MIN_TOKENS, MAX_TOKENS)
        self.least = min_match or least

    async def draft(self, text: bytes, count: int) -> tuple[bytes, float]:
        known, cut = self.alphabet.count(text), self.alphabet.cut
        for length in range(min(self.most, known - 1), self.least - 1, -1):
            found = self._before(text, cut(text, known - length))
            if found >= 0:
                return cut(text, found + length, found + length + count), 0.0
        return b"", 0.0

    def _before(self, text: bytes, ending: bytes) -> int:
        """Which symbol of `text` the last `ending` begins with that is not its end; -1 where there is none."""
        width = self.alphabet.symbol_bytes
        found = text.rfind(ending, 0, len(text) - width)
        while found > 0 and found % width:  # halves of two neighbours may look like a symbol
            found = text.rfind(ending, 0, found + len(ending) - 1)
        return found // width


class BothDrafter(Drafter):
    """Lookup where a long match makes it sure, else the model."""

    def __init__(self, model: ModelDrafter) -> None:
        self.lookup, self.model = LookupDrafter(min_match=SURE_MATCH), model

    async def draft(self, text: bytes, count: int) -> tuple[bytes, float]:
        guesses, compute_ms = await self.lookup.draft(text, count)
        return (guesses, compute_ms) if guesses else await self.model.draft(text, count)


class DraftLength:
    """How many symbols to guess, from what was accepted and how long rounds took so far.

    With acceptance a for each guess, a round of k guesses brings (1 - a^(k+1)) / (1 - a) symbols (Leviathan et al.
    2023, arXiv 2211.17192, equation 1) and takes trip + k * guess milliseconds; k maximises the quotient.
    """

    def __init__(self) -> None:
        self._right, self._tried = 3.0, 4.0  # as if 3 of 4 guesses had been right so far
        self._guess_ms, self._trip_ms = 1.0, 100.0

    @property
    def acceptance(self) -> float:
        """Share of guesses found right, of those whose place was reached."""
        return self._right / self._tried

    def learn(self, drafted: int, accepted: int, draft_ms: float, trip_ms: float) -> None:
        """Book one round."""
        if drafted:
            self._right = FORGET * self._right + accepted
            self._tried = FORGET * self._tried + accepted + (accepted < drafted)
            self._guess_ms += 0.2 * (draft_ms / drafted - self._guess_ms)
        self._trip_ms += 0.2 * (trip_ms - self._trip_ms)

    def best(self) -> int:
        """Symbols to guess in the next round."""
        a = min(self.acceptance, 0.99)
        return max(
            range(1, MAX_DRAFT + 1),
            key=lambda k: (1 - a ** (k + 1)) / (1 - a) / (self._trip_ms + k * self._guess_ms),
        )


class RunLength:
    """How many bytes to guess where a trip costs far more than a guess: until one is all but sure to be refused.

    Then there is about one trip for each guess that is refused, and no more.
    """

    def __init__(self) -> None:
        self._right, self._tried = 17.0, 20.0  # as if 17 of 20 guesses had stood so far

    def learn(self, drafted: int, accepted: int) -> None:
        """Book one run."""
        self._right = FORGET * self._right + accepted
        self._tried = FORGET * self._tried + accepted + (accepted < drafted)

    def best(self) -> int:
        """Bytes to guess in the next run."""
        a = min(self._right / self._tried, 0.999)
        least = math.ceil(math.log(1 - RUN_ENDS) / math.log(a)) if a > 0 else 1
        return min(least, MAX_RUN)
