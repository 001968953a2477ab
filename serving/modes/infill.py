"""`infill`: what stands between a text and what follows it, written so that the one leads to the other.

The drafter proposes many fillings and looks at the suffix's head after each: that costs no sweep. A few that it finds
likely go to the hosts, which score each together with that head in one sweep, and one is drawn by weight: with many
fillings, as the scorer itself would write at this temperature where its text goes on with that head. A long filling is
written in pieces: all but the last without a look at the suffix, as in `resample`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from functools import partial

from serving.accounting import Account
from serving.candidates import check_scores, read_scores
from serving.fillings import Filler, choose
from serving.local import LocalSequence
from serving.modes.base import Generation
from serving.modes.scored import SCORERS, ScoredMode
from serving.session import Session
from stages.randomness import Purpose, uniforms
from stages.refusal import invalid
from stages.scoring import MAX_SCORED_ROWS
from stages.v1 import stage_pb2

CHUNK = 32
CANDIDATES = 16
DRAFTS = 256
"""Fillings that the drafter proposes for each piece: it alone reads them all."""
LOOK_AHEAD = 16
"""Bytes of the suffix that are scored after each candidate."""


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
        chunk, ahead = min(request.chunk or CHUNK, request.max_symbols), len(_head(request))
        count = request.candidates or CANDIDATES
        if count * (chunk + ahead) > MAX_SCORED_ROWS:
            raise invalid(
                f"{count} candidates of {chunk} bytes with {ahead} of the suffix are more than hosts take in a sweep "
                f"({MAX_SCORED_ROWS} bytes in all): give fewer candidates or a smaller chunk"
            )

    def margin(self, request: Generation) -> int:
        return len(_head(request))

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        assert self.local is not None
        account.scorer = name = self.scorer(request)
        reach = len(request.prompt) + request.max_symbols
        filler = Filler(LocalSequence(self.local, reach, request.temperature, request.seed))
        *_, last = pieces = list(_pieces(request))
        count = request.candidates or CANDIDATES
        text, read = request.prompt, 0
        # candidates are not remembered, so the hosts need to cache nothing of the last piece
        async with self.ring.session(SCORERS[name], reach - last, request.deadline_unix_ms, account) as session:
            for number, length in enumerate(pieces):
                head = _head(request) if number == len(pieces) - 1 else b""
                drafts = max(DRAFTS, count) if head else count
                drafted = await filler.write(text, length, head, drafts, count, number)
                event = await _scored(session, request, number, (text, read), [x + head for x in drafted.texts])
                nats = read_scores(event.scores.nats, len(drafted.texts), length + len(head))
                shares = drafted.shares(nats.sum(axis=1))
                account.add_sweep(event)
                account.add_choice(length, shares, drafted.compute_ms)
                u = uniforms(request.seed, Purpose.CHOICE, len(text), 1, 1)[0, 0]
                piece = drafted.texts[choose(shares, u)]
                account.add_text(piece)
                yield piece
                text, read = text + piece, len(text)


def _head(request: Generation) -> bytes:
    """What of the suffix is looked at."""
    return request.suffix[:LOOK_AHEAD]


def _pieces(request: Generation) -> Iterator[int]:
    """Lengths of the pieces: the first one may be shorter than the others."""
    chunk = min(request.chunk or CHUNK, request.max_symbols)
    count = -(-request.max_symbols // chunk)
    yield request.max_symbols - (count - 1) * chunk
    yield from [chunk] * (count - 1)


async def _scored(
    session: Session, request: Generation, number: int, known: tuple[bytes, int], candidates: list[bytes]
) -> stage_pb2.Event:
    """:param known: the text before the candidates, and how much of it the hosts have read."""
    text, read = known
    await session.push(
        stage_pb2.Step(
            number=number,
            start=read,
            clean=text[read:],
            remaining=1,
            sampling=stage_pb2.Sampling(seed=request.seed, temperature=request.temperature),
            codec=request.codec,
            candidates=candidates,
        )
    )
    return await session.event(partial(check_scores, shape=(len(candidates), len(candidates[0]))))
