"""`resample`: the drafter writes many candidates of a chunk, one sweep scores them all, and one is drawn by weight.

N bytes take N / chunk sweeps: the prompt travels with the first candidates, and the chosen chunk with the next ones.
Sampling importance resampling, chunk by chunk (see serving/candidates.py): with many candidates the text has the
scorer's distribution, with one the drafter's. The drafter of a model of tokens draws a little colder than it would by
itself; the weights know.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from serving.accounting import Account
from serving.branches import Branches
from serving.candidates import check_scores, read_scores, weigh
from serving.local import LocalSequence
from serving.modes.base import Generation
from serving.modes.scored import SCORERS, ScoredMode
from serving.pace import Pace, sizes_of
from stages.refusal import invalid
from stages.v1 import stage_pb2


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
        account.scorer, alphabet = name, self.spelling.alphabet
        reach = alphabet.count(request.prompt) + request.max_symbols
        drafter = Branches(LocalSequence(model, reach, pace.sizes.coolness * request.temperature, request.seed))
        sampling = stage_pb2.Sampling(seed=request.seed, temperature=request.temperature)
        # candidates are not remembered, so of the last chunk the hosts need to cache nothing
        capacity = reach - 1
        async with self.ring.session(SCORERS[name], capacity, request.deadline_unix_ms, account) as session:
            text, read, left, number = request.prompt, 0, request.max_symbols, 0
            while left:
                drafted = await drafter.write(text, min(pace.chunk, left), pace.candidates, number)
                await session.push(
                    stage_pb2.Step(
                        number=number,
                        start=read,
                        clean=alphabet.cut(text, read),
                        remaining=1,
                        sampling=sampling,
                        codec=request.codec,
                        candidates=drafted.texts,
                    )
                )
                event = await session.event(partial(check_scores, shape=drafted.nats.shape))
                weights = weigh(drafted, read_scores(event.scores.nats, *drafted.nats.shape))
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

    def _pace(self, request: Generation) -> Pace:
        sizes = sizes_of(self.spelling.alphabet, self.width(request))
        return Pace(request.max_symbols, request.chunk, request.candidates, sizes)
