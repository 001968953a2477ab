"""`chunked` and `sweep`: the chain of blocks denoises a chunk, or the whole output, in one trip."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from serving.accounting import Account
from serving.modes.base import DEFAULT_CHUNK, DEFAULT_TOKEN_CHUNK, Generation, Mode
from serving.session import Session
from serving.spelling import IN_BYTES, Spelling
from serving.spellings import NO_TOKENS, Spellings
from serving.view import RingView
from stages.alphabet import BYTES, Alphabet
from stages.errors import CodecError
from stages.refusal import Refusal, invalid
from stages.scoring import MAX_LOGITS
from stages.v1 import stage_pb2


class ChunkedMode(Mode):
    """One chunk a sweep, each conditioned on all symbols before it."""

    name = "chunked"

    def __init__(self, ring: RingView, spellings: Spellings = NO_TOKENS) -> None:
        self.ring, self.spellings = ring, spellings

    @property
    def problem(self) -> str:
        model = self.ring.model("chain")
        if model is None:
            return "the hosts have no chain of blocks (no chain/ in their checkpoint)"
        return self.spellings.problem(model)

    @property
    def positions(self) -> int:
        model = self.ring.model("chain")
        return model.positions if model else 0

    @property
    def spelling(self) -> Spelling:
        model = self.ring.model("chain")
        return self.spellings.of(model) if model else IN_BYTES

    def check(self, request: Generation) -> None:
        chunk, alphabet = self._chunk(request), self.spelling.alphabet
        most = MAX_LOGITS // alphabet.size
        if chunk > most:
            raise invalid(
                f"{chunk} {self.spelling.noun} in one sweep are more than hosts hold the odds of ({most}): write the "
                "text in smaller chunks, with mode chunked"
            )

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        chunk, alphabet = self._chunk(request), self.spelling.alphabet
        # the last chunk is never read back, so the hosts need not cache it
        capacity = alphabet.count(request.prompt) + (request.max_symbols - 1) // chunk * chunk
        async with self.ring.session("chain", capacity, request.deadline_unix_ms, account) as session:
            clean, start, left, number = request.prompt, 0, request.max_symbols, 0
            while left:
                event = await _sweep(session, request, alphabet, number, start, clean, min(chunk, left))
                account.add_sweep(event)
                piece, ended = request.until_end(event.text, alphabet)
                account.add_text(piece)
                yield piece
                if ended:
                    return
                start, clean = start + alphabet.count(clean), piece
                left, number = left - alphabet.count(piece), number + 1

    def _chunk(self, request: Generation) -> int:
        usual = DEFAULT_CHUNK if self.spelling.alphabet == BYTES else DEFAULT_TOKEN_CHUNK
        return min(request.chunk or usual, request.max_symbols)


class SweepMode(ChunkedMode):
    """The whole output as one chunk: one sweep."""

    name = "sweep"

    def _chunk(self, request: Generation) -> int:
        return request.max_symbols


async def _sweep(
    session: Session, request: Generation, alphabet: Alphabet, number: int, start: int, clean: bytes, slots: int
) -> stage_pb2.Event:
    await session.push(
        stage_pb2.Sweep(
            number=number,
            clean_start=start,
            clean=clean,
            slots=slots,
            steps=request.steps,
            sampling=stage_pb2.Sampling(seed=request.seed, temperature=request.temperature),
            codec=request.codec,
            sampler=request.sampler,
        )
    )

    def check(event: stage_pb2.Event) -> None:
        try:
            count = len(alphabet.decode(event.text))
        except CodecError as error:
            raise Refusal(grpc.StatusCode.INTERNAL, f"a sweep came back with nonsense: {error}") from None
        if count != slots:
            raise Refusal(grpc.StatusCode.INTERNAL, f"a sweep for {slots} symbols came back with {count}")

    return await session.event(check)
