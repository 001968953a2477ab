"""`resample`: the drafter writes many candidates of the output, one sweep scores them all, and one is drawn by weight.

One trip carries the whole output, unless the request names a chunk: then N symbols take N / chunk sweeps, the prompt
travels with the first candidates, and the chosen chunk with the next ones. Sampling importance resampling (see
serving/modes/candidates.py): with many candidates the text has the scorer's distribution, with one the drafter's.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from serving.modes import SCORERS
from serving.modes.base import Generation
from serving.modes.candidates import Branches, weigh
from serving.modes.drafters.local_model import LocalSequence
from serving.modes.scored import ScoredMode, score
from serving.modes.tokenizer import BYTE_TOKENIZER
from serving.router.accounting import Account
from serving.router.session import Session
from stages.wire.status import invalid


@dataclass(frozen=True)
class ResampleSizes:
    """Sizes of a request that names none."""

    # None = the whole output.
    chunk: int | None
    candidates: int
    # Temperature of the drafter, as a multiple of the request's.
    coolness: float = 1.0


# Models that were trained here, as was their drafter. Of the way from `local` to `ar` in judge bits, at equal entropy,
# 256 bytes of models of bytes go 28 % in one trip, with 64 candidates 40 % (docs/research/mode-settings.md).
OWN = ResampleSizes(chunk=None, candidates=16)
# Imported models. About 2^KL candidates are needed for a chunk (Chatterjee and Diaconis 2018, arXiv 1511.01437), and a
# distilled drafter is 2.9 bits a token away. With twelve, 128 tokens take eleven trips, less than a tenth of those of
# `ar`. Such a drafter gives too much to the many unlikely tokens, so it draws a little colder; the weights know.
IMPORTED = ResampleSizes(chunk=12, candidates=32, coolness=0.9)


class ResampleMode(ScoredMode):
    """A fixed number of sweeps, one by default, whatever the drafter is worth."""

    name = "resample"

    def check(self, request: Generation) -> None:
        super().check(request)
        if request.temperature == 0:
            raise invalid(
                "mode resample chooses among random candidates, and at temperature 0 all are the same: "
                "give a temperature above 0, or use mode ar"
            )
        chunk, candidates = self._sizes(request)
        self.check_candidates(request, candidates, chunk)

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name, (chunk, candidates) = self.scorer(request), self._sizes(request)
        account.scorer, alphabet = name, self.tokenizer.alphabet
        reach = alphabet.count(request.prompt) + request.max_symbols
        temperature = self._usual.coolness * request.temperature
        drafter = Branches(LocalSequence(self.drafter, reach, temperature, request.seed, request.due_at))
        # candidates are not remembered, so of the last chunk the hosts need to cache nothing
        capacity = reach - 1
        with Session(self.ring, SCORERS[name], capacity, request.due_at, account) as session:
            # one text is carried on: 4, 8 and 32 of them at equal candidates closed no more of the gap to the scorer
            # (101, 108, 104 % against 107 +- 4 %), and would double what travels
            text, read, left, number = request.prompt, 0, request.max_symbols, 0
            while True:
                drafted = await drafter.write(text, min(chunk, left), candidates, number)
                step = self.step(request, number, read, alphabet.cut(text, read), drafted.texts)
                event, nats = await score(session, step)
                weights = weigh(drafted, nats)
                piece = drafted.texts[weights.choose(request.seed, alphabet.count(text))]
                account.add_sweep(event)
                account.add_candidates(drafted, weights)
                piece, ended = request.until_end(piece, alphabet)
                account.add_text(piece)
                left -= alphabet.count(piece)
                if ended := ended or not left:
                    await session.finish()
                yield piece
                if ended:
                    return
                text, read, number = text + piece, alphabet.count(text), number + 1

    @property
    def is_near(self) -> bool:
        """True if the drafter was trained as the scorer was, so that a few candidates of a whole text are enough.

        A scorer trained block by block is in no imported model's checkpoint, whatever its symbols are.
        """
        return self.tokenizer is BYTE_TOKENIZER or self.ring.model("scorer") is not None

    @property
    def _usual(self) -> ResampleSizes:
        return OWN if self.is_near else IMPORTED

    def _sizes(self, request: Generation) -> tuple[int, int]:
        """Chunk and candidates. Nothing is learnt over requests: a text would depend on who asked before."""
        usual = self._usual.chunk or request.whole(self.tokenizer.alphabet)
        chunk = min(request.chunk or usual, request.max_symbols)
        return chunk, request.candidates or max(1, min(self._usual.candidates, self.most_candidates(request, chunk)))
