"""`verified`: the drafter guesses, one sweep tells how far the guesses stand; the text has the scorer's distribution.

Every place is settled by the same steps and the same random numbers, on the hosts and here (stages/verdict.py,
serving/settling.py), so the text does not depend on how much is guessed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from serving.accounting import Account
from serving.candidates import Floats
from serving.drafters import Drafters
from serving.drafting import MAX_RUN, RunLength
from serving.local import Guesses, LocalSequence
from serving.modes.base import Generation
from serving.modes.scored import SCORERS, ScoredMode
from serving.session import Session
from serving.settling import kept, read_verdict
from serving.spellings import NO_TOKENS, Spellings
from serving.view import RingView
from stages.alphabet import Alphabet
from stages.v1 import stage_pb2
from stages.verdict import Verdict


class VerifiedMode(ScoredMode):
    """A sweep for each run of guesses: about one for each guess that is refused."""

    name = "verified"
    default_codec = "fp32"
    most_draft = MAX_RUN

    def __init__(self, ring: RingView, drafters: Drafters, spellings: Spellings = NO_TOKENS) -> None:
        super().__init__(ring, drafters, spellings)
        self._lengths = dict[tuple[str, str], RunLength]()

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name, (drafter, model) = self.scorer(request), self.drafter(request)
        length = self._lengths.setdefault((name, drafter), RunLength())
        account.scorer, alphabet = name, self.spelling.alphabet
        capacity = alphabet.count(request.prompt) + request.max_symbols
        sequence = LocalSequence(model, capacity, request.temperature, request.seed)
        async with self.ring.session(SCORERS[name], capacity, request.deadline_unix_ms, account) as session:
            judges = _Judges(session, request, alphabet, account)
            text, left = request.prompt, request.max_symbols
            while left:
                guesses = await sequence.guess(text, min(request.draft or length.best(), left))
                verdict = await judges.ask(text, guesses)
                drafted, right = len(guesses.odds), verdict.accepted
                length.learn(drafted, right)
                account.add_draft(drafted, right, guesses.compute_ms)
                piece = alphabet.cut(guesses.text, 0, right)
                if right < drafted:
                    piece += alphabet.encode([await judges.instead(text + piece, verdict, guesses.odds_at(right))])
                piece, ended = request.until_end(piece, alphabet)
                account.add_text(piece)
                yield piece
                if ended:
                    return
                text, left = text + piece, left - alphabet.count(piece)


class _Judges:
    """The hosts, and what they have read of one text."""

    def __init__(self, session: Session, request: Generation, alphabet: Alphabet, account: Account) -> None:
        self.session, self.request, self.alphabet, self.account = session, request, alphabet, account
        self.prompt = alphabet.count(request.prompt)
        self._number = self._read = 0

    async def ask(self, text: bytes, guesses: Guesses | None = None, which: int = 1) -> Verdict:
        """A verdict on guesses after `text`, with the set of draws that is `which`."""
        request, known = self.request, self.alphabet.count(text)
        drafted, odds = (guesses.text, guesses.odds) if guesses else (b"", np.empty(0, dtype=np.float32))
        # the last symbol is read again where nothing comes after it; a prompt is read whole: rounding depends on it
        start = 0 if known == self.prompt else min(self._read, known - 1)
        await self.session.push(
            stage_pb2.Step(
                number=self._number,
                start=start,
                clean=self.alphabet.cut(text, start) + drafted,
                remaining=1,
                sampling=stage_pb2.Sampling(seed=request.seed, temperature=request.temperature),
                codec=request.codec,
                draft=len(odds),
                odds=odds.astype("<f4").tobytes(),
                draws=which,
            )
        )
        read = partial(read_verdict, count=len(odds), number=which, alphabet=self.alphabet)
        event = await self.session.event(read)
        self.account.add_sweep(event)
        verdict = read(event)
        self._number, self._read = self._number + 1, known + verdict.accepted
        return verdict

    async def instead(self, text: bytes, verdict: Verdict, q: Floats) -> int:
        """The symbol after `text`, in place of a guess that was refused. q: the drafter's odds there."""
        position, which = self.alphabet.count(text), 1
        while (symbol := kept(verdict, q, self.request.seed, position, which)) is None:
            which += 1
            verdict = await self.ask(text, which=which)
        return symbol
