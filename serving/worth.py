"""What guesses are worth: how likely they stand, against what a sweep, a guess in it and its drafting take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

MAX_DRAFT = 32
FORGET = 0.98
"""Weight of what was measured, at each further round."""
RECENT = 0.1
"""Weight of the last sweep among those whose times are known."""
A_GUESS_MS = 1.0
"""What a guess adds to a sweep, as long as sweeps with more and with fewer were not compared."""
SPREAD = 4.0
"""And how much comparing it takes to believe otherwise, as a variance of guesses."""
MOST_SURE = 0.99


class SweepTime:
    """How long a sweep takes: a line over its guesses, for every host reads them all. Milliseconds."""

    def __init__(self) -> None:
        self._guesses, self._ms = 8.0, 100.0
        self._variance = self._covariance = 0.0

    def learn(self, guesses: int, ms: float) -> None:
        """Book a sweep."""
        apart, longer = guesses - self._guesses, ms - self._ms
        self._guesses += RECENT * apart
        self._ms += RECENT * longer
        self._variance = (1 - RECENT) * (self._variance + RECENT * apart * apart)
        self._covariance = (1 - RECENT) * (self._covariance + RECENT * apart * longer)

    @property
    def guess_ms(self) -> float:
        """What one more guess adds."""
        return max((self._covariance + SPREAD * A_GUESS_MS) / (self._variance + SPREAD), 0.0)

    def ms(self, guesses: int) -> float:
        """That of a sweep with so many."""
        return max(self._ms + self.guess_ms * (guesses - self._guesses), self._ms / 10)


class DraftWorth:
    """How much to guess, from what was accepted and how long sweeps and drafting took so far.

    A round of guesses brings one symbol and those that stand, in the time of the drafting and of the sweep: what is
    guessed maximises the quotient (Leviathan et al. 2023, arXiv 2211.17192, equation 1; of trees: Li et al. 2024, arXiv
    2406.16858, who take the guesses that are likeliest with all before them).
    """

    def __init__(self, sweeps: SweepTime) -> None:
        self.sweeps = sweeps
        self._right, self._tried, self._told = 3.0, 4.0, 3.0  # as if 3 of 4 guesses had been right so far
        self.level_ms = 1.0
        """What drafting one symbol after another takes for each of them."""

    @property
    def acceptance(self) -> float:
        """Share of guesses found right, of those whose place was reached."""
        return self._right / self._tried

    @property
    def trust(self) -> float:
        """How likely guesses turned out to be, as a multiple of what their drafter said."""
        return self._right / max(self._told, 1e-9)

    def learn(self, guesses: int, accepted: int, told: float, levels: int, draft_ms: float) -> None:
        """Book a round.

        :param accepted: of the first branch, that is of `guesses` one after the other.
        :param told: sum of the odds that the drafter gave those whose place was reached.
        :param levels: symbols drafted one after the other.
        """
        if guesses:
            self._right = FORGET * self._right + accepted
            self._tried = FORGET * self._tried + accepted + (accepted < guesses)
            self._told = FORGET * self._told + told
        if levels:
            self.level_ms += 0.2 * (draft_ms / levels - self.level_ms)

    def length(self) -> int:
        """Guesses of a chain of which no more is known than `acceptance`."""
        a = min(self.acceptance, MOST_SURE)
        return self.best([a ** (i + 1) for i in range(MAX_DRAFT)], self.level_ms) or 1

    def best(self, chances: Sequence[float], each_ms: float = 0.0, draft_ms: float = 0.0) -> int:
        """How many guesses to send.

        :param chances: that each stands with all before it, the likeliest first.
        :param each_ms: that drafting each one takes.
        :param draft_ms: that it took already.
        """
        symbols = accumulate(chances, initial=1.0)
        rates = [n / (draft_ms + i * each_ms + self.sweeps.ms(i)) for i, n in enumerate(symbols)]
        return max(range(len(rates)), key=rates.__getitem__)

    def another_level(self, chances: Sequence[float], ends: float, draft_ms: float) -> bool:
        """Whether to draft one symbol more.

        :param chances: of the guesses so far, and :param ends: of those that it would come after, in all.
        """
        count = self.best(sorted(chances, reverse=True), draft_ms=draft_ms)
        symbols = 1.0 + sum(sorted(chances, reverse=True)[:count])
        return ends * min(self.acceptance, MOST_SURE) / symbols > self.level_ms / (draft_ms + self.sweeps.ms(count))
