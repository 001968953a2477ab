"""`infill`: what stands between a text and what follows it, written so that the one leads to the other.

The drafter proposes many fillings and looks at the suffix's head after each: that costs no sweep. A few that it finds
likely go to the hosts, which score each together with that head in one sweep, and one is drawn by weight: with many
fillings, as the scorer itself would write at this temperature where its text goes on with that head. A long filling is
written in pieces: all but the last without a look at the suffix, as in `resample`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from functools import partial

from serving.accounting import Account
from serving.candidates import check_scores, read_scores
from serving.fillings import Filler, choose
from serving.local import LocalSequence
from serving.modes.base import Generation
from serving.modes.scored import SCORERS, ScoredMode
from stages.alphabet import BYTES
from stages.randomness import Purpose, uniforms
from stages.refusal import invalid
from stages.scoring import MAX_LOGITS
from stages.v1 import stage_pb2


@dataclass(frozen=True)
class Sizes:
    """How much is written at once, and how much of what follows is looked at."""

    chunk: int
    candidates: int
    drafts: int
    """Fillings that the drafter proposes for each piece: it alone reads them all."""
    ahead: int
    """Symbols of the suffix that are scored after each candidate."""
    peek: int
    """Of these, after so many the drafter gives up most fillings."""


OF_BYTES = Sizes(chunk=32, candidates=16, drafts=256, ahead=16, peek=4)
OF_TOKENS = Sizes(chunk=8, candidates=16, drafts=64, ahead=4, peek=1)
"""As much text, at about four bytes a token. A draft costs a look at the odds of the whole vocabulary at every symbol,
so there are fewer."""


class InfillMode(ScoredMode):
    """One sweep for each piece, and one piece where the gap is no longer than a chunk."""

    name = "infill"
    fills = True

    def check(self, request: Generation) -> None:
        if not request.suffix:
            raise invalid("mode infill writes what stands before a given suffix: give one (--suffix), or use resample")
        if request.temperature == 0:
            raise invalid(
                "mode infill chooses among random candidates, and at temperature 0 all are the same: "
                "give a temperature above 0"
            )
        super().check(request)
        sizes = self._sizes(request)
        self.check_candidates(request, sizes.candidates, min(sizes.chunk, request.max_symbols), self.margin(request))
        self.check_candidates(request, sizes.drafts + 1, 1)

    def margin(self, request: Generation) -> int:
        return self.spelling.alphabet.count(self._head(request))

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        account.scorer = name = self.scorer(request)
        (_, model), sizes, alphabet = self.drafter(request), self._sizes(request), self.spelling.alphabet
        reach = alphabet.count(request.prompt) + request.max_symbols
        filler = Filler(LocalSequence(model, reach, request.temperature, request.seed), sizes.peek)
        *_, last = pieces = list(_pieces(request.max_symbols, sizes.chunk))
        text, read = request.prompt, 0
        # candidates are not remembered, so the hosts need to cache nothing of the last piece
        async with self.ring.session(SCORERS[name], reach - last, request.deadline_unix_ms, account) as session:
            for number, length in enumerate(pieces):
                head = self._head(request) if number == len(pieces) - 1 else b""
                drafts = sizes.drafts if head else sizes.candidates
                drafted = await filler.write(text, length, head, drafts, sizes.candidates, number)
                candidates = [each + head for each in drafted.texts]
                shape = (len(candidates), alphabet.count(candidates[0]))
                await session.push(_step(request, number, read, alphabet.cut(text, read), candidates))
                event = await session.event(partial(check_scores, shape=shape))
                shares = drafted.shares(read_scores(event.scores.nats, *shape).sum(axis=1))
                account.add_sweep(event)
                account.add_choice(length, shares, drafted.compute_ms)
                known = alphabet.count(text)
                u = uniforms(request.seed, Purpose.CHOICE, known, 1, 1)[0, 0]
                piece = drafted.texts[choose(shares, u)]
                account.add_text(piece)
                yield piece
                text, read = text + piece, known

    def _head(self, request: Generation) -> bytes:
        """What of the suffix is looked at."""
        return self.spelling.alphabet.cut(request.suffix, 0, self._sizes(request).ahead)

    def _sizes(self, request: Generation) -> Sizes:
        """What the user gave, and the rest as it is without."""
        usual = OF_BYTES if self.spelling.alphabet == BYTES else OF_TOKENS
        count = request.candidates or usual.candidates
        room = MAX_LOGITS // self.spelling.alphabet.size - 1
        drafts = max(min(usual.drafts, room), count)
        return replace(usual, chunk=request.chunk or usual.chunk, candidates=count, drafts=drafts)


def _pieces(length: int, chunk: int) -> Iterator[int]:
    """Lengths of the pieces: the first one may be shorter than the others."""
    chunk = min(chunk, length)
    count = -(-length // chunk)
    yield length - (count - 1) * chunk
    yield from [chunk] * (count - 1)


def _step(request: Generation, number: int, read: int, clean: bytes, candidates: list[bytes]) -> stage_pb2.Step:
    """:param read: symbols that the hosts have read."""
    return stage_pb2.Step(
        number=number,
        start=read,
        clean=clean,
        remaining=1,
        sampling=stage_pb2.Sampling(seed=request.seed, temperature=request.temperature),
        codec=request.codec,
        candidates=candidates,
    )
