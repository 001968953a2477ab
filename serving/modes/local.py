"""`local`: a small AR model on the router's own machine, no sweep at all. What a sweep must beat on quality."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from serving.modes.base import Generation, Mode
from serving.modes.candidates import Branches
from serving.modes.drafters.local_model import LocalModel, LocalSequence
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.accounting import Account
from stages.wire.status import invalid


class LocalMode(Mode):
    """Zero sweeps."""

    name = "local"
    uses_hosts = False

    def __init__(self, model: LocalModel | None, tokenizers: Tokenizers) -> None:
        self.model, self.tokenizers = model, tokenizers

    @property
    def problem(self) -> str:
        if self.model:
            return ""
        return (
            "the router has no local model: start it with a checkpoint that has local/, which `onesweep distill` makes "
            "for a model of tokens"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.named(self.model.digest) if self.model else BYTE_TOKENIZER

    @property
    def positions(self) -> int:
        return self.model.positions if self.model else 0

    def length(self, request: Generation) -> int:
        return request.whole(self.tokenizer.alphabet) if request.candidates else request.max_symbols

    def check(self, request: Generation) -> None:
        assert self.model is not None
        if request.candidates and request.shapes:
            name = next(iter(request.shapes))
            raise invalid(f"mode local draws candidates without {name}: leave out one of {name} and candidates")
        length = self.length(request)
        fit = self.model.most_branches(length)
        if request.candidates and request.candidates > fit:
            raise invalid(
                f"{request.candidates} candidates of {length} {self.tokenizer.noun} are more than the "
                f"local model has memory for: give at most {fit}"
            )

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        assert self.model is not None
        if request.candidates:
            piece, _ = request.until_end(await self._likeliest(request, account), self.tokenizer.alphabet)
            account.add_text(piece)
            yield piece
            return
        turns = self.model.generate(
            request.prompt, request.max_symbols, request.temperature, request.seed, request.due_at, request.shaping
        )
        async with aclosing(turns):
            async for text, compute_ms in turns:
                account.local_compute_ms += compute_ms
                piece, ended = request.until_end(text, self.tokenizer.alphabet)
                account.add_text(piece)
                yield piece
                if ended:
                    return

    async def _likeliest(self, request: Generation, account: Account) -> bytes:
        """The likeliest of `candidates` texts by the model's own odds: what a choice is worth without a scorer."""
        assert self.model is not None
        length = self.length(request)
        reach = self.tokenizer.alphabet.count(request.prompt) + length
        branches = Branches(LocalSequence(self.model, reach, request.temperature, request.seed, request.due_at))
        assert request.candidates
        drafted = await branches.write(request.prompt, length, request.candidates, 0)
        best = int(drafted.nats.sum(axis=1).argmax())
        account.add_choice(length, np.arange(request.candidates) == best, drafted.compute_ms)
        return drafted.texts[best]
