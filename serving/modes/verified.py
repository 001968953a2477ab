"""`verified`: the drafter guesses, one sweep tells how far the guesses stand; the text has the scorer's distribution.

Rejection sampling (Leviathan et al. 2023, arXiv 2211.17192): a guess x is accepted with probability min(1, p(x)/q(x)),
and what comes in place of a refused one is drawn from the part of p that exceeds q. Every place is settled by the same
steps and the same random numbers, whether on the hosts or here, so the text does not depend on how much is guessed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np

from serving.accounting import Account
from serving.candidates import Floats, draw
from serving.drafting import MAX_RUN, RunLength
from serving.local import Guesses, LocalModel, LocalSequence
from serving.modes.base import Generation
from serving.modes.scored import SCORERS, ScoredMode
from serving.view import RingView
from stages.architecture import VOCABULARY
from stages.randomness import Purpose, uniforms
from stages.refusal import Refusal
from stages.v1 import stage_pb2


class VerifiedMode(ScoredMode):
    """A sweep for each run of guesses: about one for each guess that is refused."""

    name = "verified"
    default_codec = "fp32"
    most_draft = MAX_RUN

    def __init__(self, ring: RingView, local: LocalModel | None) -> None:
        super().__init__(ring, local)
        self._lengths = {name: RunLength() for name in SCORERS}

    def margin(self, request: Generation) -> int:
        return 1  # the last byte may be a guess too, and a step keeps room for the byte after its guesses

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        assert self.local is not None
        name = self.scorer(request)
        length, account.scorer = self._lengths[name], name
        capacity = len(request.prompt) + request.max_symbols
        drafter = LocalSequence(self.local, capacity, request.temperature, request.seed)
        sampling = stage_pb2.Sampling(seed=request.seed, temperature=request.temperature)
        async with self.ring.session(SCORERS[name], capacity, request.deadline_unix_ms, account) as session:
            text, read, left, number = request.prompt, 0, request.max_symbols, 0
            while left:
                count = min(request.draft or length.best(), left)
                # one more than the hosts hear of: for the place after a run that stands
                guesses = await drafter.guess(text, min(count + 1, left))
                await session.push(
                    stage_pb2.Step(
                        number=number,
                        start=read,
                        clean=text[read:] + guesses.text[:count],
                        remaining=1,
                        sampling=sampling,
                        codec=request.codec,
                        draft=count,
                        odds=_odds(guesses, count),
                    )
                )
                event = await session.event(partial(read_verdict, count=count))
                accepted, p = read_verdict(event, count)
                length.learn(count, accepted)
                piece, right = guesses.text[:accepted], accepted
                if accepted < len(guesses.text):
                    place = Place(guesses, accepted, p, request.seed, len(text) + accepted)
                    stands = accepted == count and place.stands()
                    piece, right = piece + (place.guess if stands else place.instead()), accepted + stands
                account.add_sweep(event)
                account.add_draft(len(guesses.text), right, guesses.compute_ms)
                account.add_text(piece)
                yield piece
                # the hosts have read all but the byte that was settled here
                read, text, number = len(text) + accepted, text + piece, number + 1
                left -= len(piece)


@dataclass(frozen=True)
class Place:
    """A place in the text that the hosts left open: its guess was refused, or they heard of none."""

    guesses: Guesses
    index: int
    """Which of the guesses is the one for this place."""
    p: Floats
    """The scorer's odds of all bytes here."""
    seed: int
    position: int

    @property
    def guess(self) -> bytes:
        return self.guesses.text[self.index : self.index + 1]

    def stands(self) -> bool:
        """Whether the guess is accepted, drawn as the hosts draw it."""
        u = uniforms(self.seed, Purpose.ACCEPT, self.position, 1, 1)[0, 0]
        x = self.guess[0]
        return bool(u * float(np.float32(self.guesses.odds[self.index, x])) <= self.p[x])

    def instead(self) -> bytes:
        """A byte in place of a guess that was refused: drawn from what p has more than q."""
        rest = np.maximum(self.p - self.guesses.odds[self.index], 0.0)
        if not rest.any():  # p and q are equal but for rounding
            rest = self.p
        u = uniforms(self.seed, Purpose.RESIDUAL, self.position, 1, 1)[:, 0]
        return bytes(draw(rest[None], u).tolist())


def _odds(guesses: Guesses, count: int) -> bytes:
    """What the drafter gave each of the first guesses, as a step carries it."""
    drawn = guesses.odds[np.arange(count), list(guesses.text[:count])]
    return np.maximum(drawn.astype("<f4"), np.finfo(np.float32).tiny).tobytes()


def read_verdict(event: stage_pb2.Event, count: int) -> tuple[int, Floats]:
    """How many guesses stand, and the odds (256,) of what comes after them. Raises Refusal."""
    accepted, odds = event.verdict.accepted, event.verdict.odds
    if event.WhichOneof("outcome") != "verdict" or accepted > count or len(odds) != 4 * VOCABULARY:
        raise Refusal(grpc.StatusCode.INTERNAL, f"the verdict on {count} guesses came back as something else")
    p = np.frombuffer(odds, dtype="<f4").astype(np.float64)
    if not (np.isfinite(p).all() and p.any() and (p >= 0).all()):
        raise Refusal(grpc.StatusCode.INTERNAL, "the scorer's odds are no probabilities: look at the hosts' weights")
    return accepted, p
