"""`resample`: the drafter writes many candidates of a chunk, one sweep scores them all, and one is drawn by weight.

N bytes take N / chunk sweeps: the prompt travels with the first candidates, and the chosen chunk with the next ones.
Sampling importance resampling, chunk by chunk (see serving/modes/candidates.py): with many candidates the text has the
scorer's distribution, with one the drafter's. The drafter of a model of tokens draws a little colder than it would by
itself; the weights know.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from onesweep.serving.modes import SCORERS
from onesweep.serving.modes.base import Generation
from onesweep.serving.modes.candidates import Branches, ImportanceWeights, weigh
from onesweep.serving.modes.drafters.base import LocalSequence
from onesweep.serving.modes.scored import ScoredMode, score
from onesweep.serving.router.accounting import Account
from onesweep.serving.router.session import Session
from onesweep.stages.model.scoring import MAX_LOGITS, MAX_SCORED_ROWS, most_scored
from onesweep.stages.model.vocabulary import BYTES, Alphabet
from onesweep.stages.wire.status import invalid

# How long the candidates of a sweep are, and how many.
#
# About 2^KL candidates are needed for a chunk (Chatterjee and Diaconis 2018, arXiv 1511.01437), and KL grows with the
# chunk's length: with too few, one candidate has all the weight and there is no choice. Where a chunk is borne
# easily, a
# longer one saves trips.


@dataclass(frozen=True)
class ResampleSizes:
    """Sizes that a request begins with, and the largest that are taken by default."""

    chunk: int
    candidates: int
    most_chunk: int
    # Their hidden states travel from host to host.
    most_candidates: int
    # Symbols of all candidates of a sweep together.
    rows: int = MAX_SCORED_ROWS
    # Temperature of the drafter, as a multiple of the request's.
    coolness: float = 1.0


OF_BYTES = ResampleSizes(chunk=32, candidates=32, most_chunk=96, most_candidates=64)
# A token is about four bytes. Eight would be as much text; with twelve, 128 tokens take eleven trips, less than a tenth
# of those of `ar`. Small models of tokens give too much to the many unlikely ones: docs/research/mode-settings.md.
OF_TOKENS = ResampleSizes(chunk=12, candidates=32, most_chunk=32, most_candidates=64, coolness=0.9)


def sizes_of(alphabet: Alphabet, width: int) -> ResampleSizes:
    """Sizes for texts of these symbols, scored by a model of that width."""
    rows = most_scored(width)
    if alphabet == BYTES:
        return replace(OF_BYTES, rows=rows)
    room = MAX_LOGITS // alphabet.size  # in the drafter, which looks at the odds of every symbol after each of them
    few, most = (min(count, room) for count in (OF_TOKENS.candidates, OF_TOKENS.most_candidates))
    return replace(OF_TOKENS, candidates=few, most_candidates=most, rows=rows)


# Sweeps with the same numbers before they are judged: one alone says little.
LOOK = 2
# With fewer effective candidates than this, there should have been more.
FEW = 1.2
# With a larger share of effective candidates than this, a chunk can be longer.
MANY = 0.25


class ChunkSchedule:
    """Chunk and candidates of each sweep of one request.

    What the user gave stays as it is. The rest starts from the defaults and follows the weights that the request itself
    has seen, and nothing else: the same request gives the same text on any replica. Chunks never get shorter than the
    first, so there are never more trips than with it.
    """

    def __init__(
        self, max_symbols: int, chunk: int | None, candidates: int | None, sizes: ResampleSizes = OF_BYTES
    ) -> None:
        """:param max_symbols: of the whole text.
        :param chunk, candidates: the user's, or None."""
        rows, self.sizes = sizes.rows, sizes
        self.chunk = self._first = min(chunk or min(sizes.chunk, rows // (candidates or sizes.candidates)), max_symbols)
        self.candidates = candidates or max(1, min(sizes.candidates, rows // self.chunk))
        # nothing is learnt over requests: a text would depend on who asked before
        self._longer, self._more = chunk is None, candidates is None
        self._effective = list[float]()

    def learn(self, weights: ImportanceWeights) -> None:
        """Book a sweep's weights."""
        self._effective.append(weights.effective)
        if len(self._effective) == LOOK:
            self._judge(sum(self._effective) / LOOK)
            self._effective = []

    def _judge(self, effective: float) -> None:
        if effective < FEW:
            if self.chunk > self._first:
                self.chunk = max(self._first, self.chunk * 2 // 3)
            elif self._more:
                self.candidates = min(2 * self.candidates, self.sizes.most_candidates, self.sizes.rows // self.chunk)
        elif effective > MANY * self.candidates and self._longer:
            self.chunk = min(self.chunk * 3 // 2, self.sizes.most_chunk, self.sizes.rows // self.candidates)


class ResampleMode(ScoredMode):
    """A fixed number of sweeps, whatever the drafter is worth."""

    name = "resample"

    def check(self, request: Generation) -> None:
        super().check(request)
        if request.temperature == 0:
            raise invalid(
                "mode resample chooses among random candidates, and at temperature 0 all are the same: "
                "give a temperature above 0, or use mode verified"
            )
        pace = self._pace(request)
        self.check_candidates(request, pace.candidates, pace.chunk)

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name, (_, model), pace = self.scorer(request), self.drafter(request), self._pace(request)
        account.scorer, alphabet = name, self.tokenizer.alphabet
        reach = alphabet.count(request.prompt) + request.max_symbols
        temperature = pace.sizes.coolness * request.temperature
        drafter = Branches(LocalSequence(model, reach, temperature, request.seed, request.deadline_unix_ms))
        # candidates are not remembered, so of the last chunk the hosts need to cache nothing
        capacity = reach - 1
        with Session(self.ring, SCORERS[name], capacity, request.deadline_unix_ms, account) as session:
            # one text is carried on: 4, 8 and 32 of them at equal candidates closed no more of the gap to the scorer
            # (101, 108, 104 % against 107 +- 4 %), and would double what travels
            text, read, left, number = request.prompt, 0, request.max_symbols, 0
            while left:
                drafted = await drafter.write(text, min(pace.chunk, left), pace.candidates, number)
                step = self.step(request, number, read, alphabet.cut(text, read), drafted.texts)
                event, nats = await score(session, step, alphabet)
                weights = weigh(drafted, nats)
                piece = drafted.texts[weights.choose(request.seed, alphabet.count(text))]
                account.add_sweep(event)
                account.add_candidates(drafted, weights)
                piece, ended = request.until_end(piece, alphabet)
                account.add_text(piece)
                yield piece
                if ended:
                    return
                pace.learn(weights)
                text, read, number = text + piece, alphabet.count(text), number + 1
                left -= alphabet.count(piece)

    def _pace(self, request: Generation) -> ChunkSchedule:
        sizes = sizes_of(self.tokenizer.alphabet, self.width(request))
        return ChunkSchedule(request.max_symbols, request.chunk, request.candidates, sizes)
