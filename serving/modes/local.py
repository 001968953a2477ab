"""Zero sweeps: the router's own model generates on its own machine, modes `local` and `local:copy`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from serving.modes import COPY, NO_COPY
from serving.modes.base import Generation, Mode
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.accounting import Account
from stages.checkpoint.bundle import find_bundle

if TYPE_CHECKING:
    from serving.router.own_models import LocalModel


def drafter_problem(model: "LocalModel | None", tokenizer: Tokenizer) -> str:
    """Why the router's own model cannot draft for the hosts' model, whose tokenizer this is; empty if it can."""
    why = ""
    if model is not None:
        if model.vocabulary != tokenizer.vocabulary:
            why = f" (its model has {model.vocabulary.size} tokens and the hosts' model {tokenizer.vocabulary.size})"
        elif model.tokenizer_id != tokenizer.id:
            why = " (its model has another tokenizer than the hosts' model)"
        else:
            return ""
    if tokenizer is BYTE_TOKENIZER:
        return f"the router has no drafter that writes bytes{why}: start it with a bundle that has local/"
    return (
        f"the router has no drafter that writes the hosts' tokens{why}: import the model with --drafter copy:q8, and "
        "start the router with that checkpoint"
    )


def read_local_model(directory: Path) -> "LocalModel | None":
    """The drafter of a bundle or a checkpoint, if it has one. Blocks. Raises OnesweepError for a damaged one."""
    if (local := find_bundle(directory).local) is None:
        return None
    from serving.router.own_models import LocalModel  # imports torch

    return LocalModel(local)


# Baselines: a sweep must give better text than these.


class LocalMode(Mode):
    """Zero sweeps, by a small model."""

    name = "local"
    uses_hosts = False
    absent = (
        "the router has no local model in what it serves (a copy of the hosts' is mode local:copy): start it with, or "
        "deploy, a checkpoint that has local/, which `onesweep import --drafter MODEL` makes of a smaller one"
    )

    def __init__(self, model: "LocalModel | None", tokenizers: Tokenizers) -> None:
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
    """Zero sweeps, by the hosts' own model in fewer bits: all that one machine could do without them."""

    name = COPY
    absent = NO_COPY
