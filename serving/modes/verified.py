"""`verified`: the drafter guesses, one sweep tells how far the guesses stand; the text has the scorer's distribution.

Every place is settled by the same steps and the same random numbers, on the hosts and here (model/speculation.py,
serving/modes/verified.py), so the text does not depend on how much is guessed.
"""

from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from onesweep.serving.modes import SCORERS
from onesweep.serving.modes.base import Generation
from onesweep.serving.modes.candidates import Floats, draw
from onesweep.serving.modes.drafters.available import Drafters
from onesweep.serving.modes.drafters.base import Guesses, LocalSequence
from onesweep.serving.modes.drafters.drafting import MAX_RUN, RunLength
from onesweep.serving.modes.scored import ScoredMode
from onesweep.serving.modes.tokenizer import Tokenizers
from onesweep.serving.router.accounting import Account
from onesweep.serving.router.ring import RingView
from onesweep.serving.router.session import Session
from onesweep.stages.errors import CodecError
from onesweep.stages.model.randomness import Purpose, uniforms
from onesweep.stages.model.speculation import Verification, draw_set_size
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.status import internal

# What comes in place of a refused guess, from a verdict's draws (stages/model/speculation.py).


def read_verdict(event: stage_pb2.Event, count: int, number: int, alphabet: Alphabet) -> Verification:
    """The verdict on `count` guesses with the set of that number, where one does not stand. Raises Refusal."""
    told = event.verification
    if event.WhichOneof("outcome") != "verification" or told.accepted > count:
        raise internal(f"the verdict on {count} guesses came back as something else")
    size = 0 if count and told.accepted == count else draw_set_size(number, alphabet.size)
    whole = size == alphabet.size
    try:
        symbols = np.arange(size) if whole else alphabet.decode(told.symbols).numpy()
    except CodecError as error:
        raise internal(f"a verdict came back with nonsense: {error}") from None
    if len(symbols) != size or len(told.odds) != 4 * size or (whole and told.symbols):
        raise internal(f"a verdict that should tell the odds of {size} symbols came back with {len(told.odds)} bytes")
    odds = np.frombuffer(told.odds, dtype="<f4").astype(np.float64)
    least = 0.0 if whole else np.finfo(np.float64).tiny  # what was drawn is possible
    if not ((odds >= least) & (odds <= 1)).all() or (whole and not odds.any()):
        raise internal("the scorer's odds are no probabilities: look at the hosts' weights")
    return Verification(told.accepted, symbols, odds)


def residual_sample(verdict: Verification, q: Floats, seed: int, position: int, number: int) -> int | None:
    """The symbol at a place whose guess was refused: a draw from the part of p that exceeds q; None: ask for the next
    set. q: the drafter's odds of all symbols there, (vocabulary,)."""
    symbols, p = verdict.symbols, verdict.odds
    if len(symbols) == len(q):
        rest = np.maximum(p - q, 0.0)
        u = uniforms(seed, Purpose.RESIDUAL, position, 1, 1)[:, 0]
        return int(draw((rest if rest.any() else p)[None], u)[0])  # none: p and q are equal but for rounding
    u = uniforms(seed, Purpose.KEEP, position, 1, len(symbols), number)[0]
    fits = np.flatnonzero(u <= 1 - q[symbols] / p)
    return int(symbols[fits[0]]) if len(fits) else None


# Rejection accepts more than the draws of `ar-speculative`, and there is no text of another mode to keep to. A run that
# stands whole settles its guesses and nothing else, so the text does not depend on where a run ends.
class VerifiedMode(ScoredMode):
    """A sweep for each run of guesses: about one for each guess that is refused."""

    name = "verified"
    default_codec = "fp32"
    most_draft = MAX_RUN

    def __init__(self, ring: RingView, drafters: Drafters, tokenizers: Tokenizers) -> None:
        super().__init__(ring, drafters, tokenizers)
        self._lengths = dict[tuple[str, str], RunLength]()

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name, (drafter, model) = self.scorer(request), self.drafter(request)
        length = self._lengths.setdefault((name, drafter), RunLength())
        account.scorer, alphabet = name, self.tokenizer.alphabet
        capacity = alphabet.count(request.prompt) + request.max_symbols
        sequence = LocalSequence(model, capacity, request.temperature, request.seed, shaping=request.shaping)
        with Session(self.ring, SCORERS[name], capacity, request.due_at, account) as session:
            judges = _Judges(session, request, alphabet, account)
            text, left = request.prompt, request.max_symbols
            while True:
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
                text, left = text + piece, left - alphabet.count(piece)
                if ended := ended or not left:
                    await session.finish()
                yield piece
                if ended:
                    return


class _Judges:
    """The hosts, and what they have read of one text."""

    def __init__(self, session: Session, request: Generation, alphabet: Alphabet, account: Account) -> None:
        self.session, self.request, self.alphabet, self.account = session, request, alphabet, account
        self.prompt = alphabet.count(request.prompt)
        self._number = self._read = 0

    async def ask(self, text: bytes, guesses: Guesses | None = None, which: int = 1) -> Verification:
        """A verdict on guesses after `text`, with the set of draws that is `which`."""
        request, known = self.request, self.alphabet.count(text)
        drafted, odds = (guesses.text, guesses.odds) if guesses else (b"", np.empty(0, dtype=np.float32))
        # the last symbol is read again where nothing comes after it; a prompt is read whole: rounding depends on it
        start = 0 if known == self.prompt else min(self._read, known - 1)
        await self.session.push(
            stage_pb2.Verify(
                number=self._number,
                start=start,
                clean=self.alphabet.cut(text, start) + drafted,
                prompt=request.given_symbols,
                sampling=request.sampling,
                codec=request.codec,
                draft=len(odds),
                rejection=stage_pb2.RejectionSampling(odds=odds.astype("<f4").tobytes(), draw_set=which),
            )
        )
        read = partial(read_verdict, count=len(odds), number=which, alphabet=self.alphabet)
        event = await self.session.event(read)
        self.account.add_sweep(event)
        verdict = read(event)
        self._number, self._read = self._number + 1, known + verdict.accepted
        return verdict

    async def instead(self, text: bytes, verdict: Verification, q: Floats) -> int:
        """The symbol after `text`, in place of a guess that was refused. q: the drafter's odds there."""
        position, which = self.alphabet.count(text), 1
        while (symbol := residual_sample(verdict, q, self.request.seed, position, which)) is None:
            which += 1
            verdict = await self.ask(text, which=which)
        return symbol
