"""`ar`: the AR pipeline over the same hosts. The last host samples; one symbol costs one trip round the ring."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import grpc

from serving.modes.base import Generation, Mode
from serving.modes.tokenizer import BYTE_TOKENIZER, NO_TOKENIZERS, Tokenizer, Tokenizers
from serving.router.accounting import Account
from serving.router.ring import RingView
from serving.router.session import Session
from stages.errors import CodecError
from stages.model.codec import HIDDEN
from stages.model.vocabulary import Alphabet
from stages.v1 import stage_pb2
from stages.wire.status import StatusError


class ArMode(Mode):
    """Token by token, KV-cached. The last host hands each symbol to the first host and to the router at once."""

    name = "ar"
    codecs = tuple(HIDDEN)
    default_codec = "fp32"

    def __init__(self, ring: RingView, tokenizers: Tokenizers = NO_TOKENIZERS) -> None:
        self.ring, self.tokenizers = ring, tokenizers

    @property
    def problem(self) -> str:
        model = self.ring.model("ar")
        if model is None:
            return "the hosts have no AR model (no ar/ in their checkpoint)"
        return self.tokenizers.problem(model)

    @property
    def positions(self) -> int:
        model = self.ring.model("ar")
        return model.positions if model else 0

    @property
    def tokenizer(self) -> Tokenizer:
        model = self.ring.model("ar")
        return self.tokenizers.of(model) if model else BYTE_TOKENIZER

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        alphabet = self.tokenizer.alphabet
        capacity = alphabet.count(request.prompt) + request.max_symbols - 1  # the last symbol is never read back
        with Session(self.ring, "ar", capacity, request.deadline_unix_ms, account) as session:
            await session.push(
                stage_pb2.Decode(
                    clean=request.prompt,
                    remaining=request.max_symbols,
                    sampling=stage_pb2.Sampling(seed=request.seed, temperature=request.temperature),
                    codec=request.codec,
                )
            )
            for _ in range(request.max_symbols):
                event = await session.event(partial(check_symbols, alphabet=alphabet))
                account.add_sweep(event)
                account.add_text(event.text)
                yield event.text
                if request.ends.intersection(alphabet.symbols(event.text)):
                    return


def check_symbols(event: stage_pb2.Event, alphabet: Alphabet, most: int = 1) -> None:
    """Raise Refusal unless `event` brings 1 to `most` symbols."""
    try:
        count = len(alphabet.decode(event.text))
    except CodecError as error:
        raise StatusError(grpc.StatusCode.INTERNAL, f"a step came back with nonsense: {error}") from None
    if not 1 <= count <= most:
        raise StatusError(grpc.StatusCode.INTERNAL, f"a step that may bring {most} symbols came back with {count}")
