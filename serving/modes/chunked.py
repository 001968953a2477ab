"""`chunked` and `sweep`: the chain of blocks denoises a chunk, or the whole output, in one trip."""

from collections.abc import AsyncGenerator

from serving.modes.base import DEFAULT_CHUNK, DEFAULT_TOKEN_CHUNK, Generation, PipelineMode, book, count_tokens
from serving.router.accounting import Account
from serving.router.session import Session
from stages.model.scoring import MAX_LOGITS
from stages.model.vocabulary import BYTES
from stages.v1 import stage_pb2
from stages.wire.status import internal, invalid


class ChunkedMode(PipelineMode):
    """One chunk per sweep, conditioned on all tokens before it."""

    name = "chunked"
    kind = "chain"
    absent = "the hosts have no chain of blocks (no chain/ in their checkpoint)"

    def check(self, request: Generation) -> None:
        chunk, vocabulary = self._chunk(request), self.tokenizer.vocabulary
        most = MAX_LOGITS // vocabulary.size
        if chunk > most:
            raise invalid(
                f"a chunk of {chunk} {self.tokenizer.noun} needs too much memory on the hosts (at most {most}): "
                "give a smaller chunk, with mode chunked"
            )

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        chunk, left, vocabulary = self._chunk(request), self.length(request), self.tokenizer.vocabulary
        account.chunk = max(account.chunk, chunk)
        # the last chunk is never read back, so the hosts need not cache it
        capacity = vocabulary.count(request.prompt) + (left - 1) // chunk * chunk
        with Session(self.ring, self.kind, capacity, request.due_at, account) as session:
            text = request.prompt
            while left:
                slots = min(chunk, left)
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

                def check(event: stage_pb2.Event, slots: int = slots) -> None:
                    if (count := count_tokens(event, vocabulary, "sweep")) != slots:
                        raise internal(f"a sweep for {slots} tokens returned {count}")

                account.add_sweep(event := await session.event(check))
                piece, left = await book(session, request, event.text, left)
                yield piece
                text += piece

    def _chunk(self, request: Generation) -> int:
        usual = DEFAULT_CHUNK if self.tokenizer.vocabulary == BYTES else DEFAULT_TOKEN_CHUNK
        return min(request.chunk or usual, request.max_tokens)


class SweepMode(ChunkedMode):
    """The whole output as one chunk: one sweep."""

    name = "sweep"

    def length(self, request: Generation) -> int:
        return request.whole(self.tokenizer.vocabulary)

    def _chunk(self, request: Generation) -> int:
        return self.length(request)
