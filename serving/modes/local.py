"""`local`, `local:copy`: a model on the router's own machine, no sweep at all. What a sweep must beat on quality."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from serving.modes import COPY, NO_COPY
from serving.modes.base import Generation, Mode
from serving.modes.local_model import LocalModel
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.accounting import Account


class LocalMode(Mode):
    """Zero sweeps, by a small model."""

    name = "local"
    uses_hosts = False
    absent = (
        "the router has no local model (a copy of the hosts' is mode local:copy): start it with a checkpoint that "
        "has local/, which `onesweep import --drafter MODEL` makes of a smaller one"
    )

    def __init__(self, model: LocalModel | None, tokenizers: Tokenizers) -> None:
        self.model, self.tokenizers = model, tokenizers

    @property
    def problem(self) -> str:
        return "" if self.model else self.absent

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.of(self.model.digest) if self.model else BYTE_TOKENIZER

    @property
    def positions(self) -> int:
        return self.model.positions if self.model else 0

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        assert self.model is not None
        turns = self.model.generate(
            request.prompt, request.max_tokens, request.temperature, request.seed, request.due_at, request.shaping
        )
        async with aclosing(turns):
            async for text, compute_ms in turns:
                account.local_compute_ms += compute_ms
                piece, ended = request.until_end(text, self.tokenizer.vocabulary)
                account.add_text(piece)
                yield piece
                if ended:
                    return


class CopyMode(LocalMode):
    """Zero sweeps, by the hosts' own model in fewer bits: what its holder would have without them."""

    name = COPY
    absent = NO_COPY
