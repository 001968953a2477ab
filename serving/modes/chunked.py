"""`chunked` and `sweep`: the chain of blocks denoises a chunk, or the whole output, in one trip."""

from collections.abc import AsyncGenerator

from serving.modes.base import DEFAULT_CHUNK, DEFAULT_TOKEN_CHUNK, Generation, PipelineMode, count_symbols
from serving.router.accounting import Account
from serving.router.session import Session
from stages.model.scoring import MAX_LOGITS
from stages.model.vocabulary import BYTES, Alphabet
from stages.v1 import stage_pb2
from stages.wire.status import internal, invalid


def usual_chunk(alphabet: Alphabet) -> int:
    """Symbols a sweep where a request does not say."""
    return DEFAULT_CHUNK if alphabet == BYTES else DEFAULT_TOKEN_CHUNK


class ChunkedMode(PipelineMode):
    """One chunk a sweep, each conditioned on all symbols before it."""

    name = "chunked"
    kind = "chain"
    absent = "the hosts have no chain of blocks (no chain/ in their checkpoint)"

    def check(self, request: Generation) -> None:
        chunk, alphabet = self._chunk(request), self.tokenizer.alphabet
        most = MAX_LOGITS // alphabet.size
        if chunk > most:
            raise invalid(
                f"{chunk} {self.tokenizer.noun} in one sweep are more than hosts hold the odds of ({most}): write the "
                "text in smaller chunks, with mode chunked"
            )

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        chunk, left, alphabet = self._chunk(request), self.length(request), self.tokenizer.alphabet
        account.chunk = max(account.chunk, chunk)
        # the last chunk is never read back, so the hosts need not cache it
        capacity = alphabet.count(request.prompt) + (left - 1) // chunk * chunk
        with Session(self.ring, self.kind, capacity, request.due_at, account) as session:
            text = request.prompt
            while True:
                event = await _sweep(session, request, alphabet, text, min(chunk, left))
                account.add_sweep(event)
                piece, ended = request.until_end(event.text, alphabet)
                account.add_text(piece)
                left -= alphabet.count(piece)
                if ended := ended or not left:
                    await session.finish()
                yield piece
                if ended:
                    return
                text += piece

    def _chunk(self, request: Generation) -> int:
        return min(request.chunk or usual_chunk(self.tokenizer.alphabet), request.max_symbols)


class SweepMode(ChunkedMode):
    """The whole output as one chunk: one sweep."""

    name = "sweep"

    def length(self, request: Generation) -> int:
        return request.whole(self.tokenizer.alphabet)

    def _chunk(self, request: Generation) -> int:
        return self.length(request)


async def _sweep(session: Session, request: Generation, alphabet: Alphabet, text: bytes, slots: int) -> stage_pb2.Event:
    await session.push(
        stage_pb2.Sweep(
            slots=slots,
            steps=request.steps,
            sampling=request.sampling,
            codec=request.codec,
            sampler=request.sampler,
        ),
        text,
    )

    def check(event: stage_pb2.Event) -> None:
        if (count := count_symbols(event, alphabet, "sweep")) != slots:
            raise internal(f"a sweep for {slots} symbols came back with {count}")

    return await session.event(check)
