"""`local`: a small AR model on the router's own machine, no sweep at all. What a sweep must beat on quality."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from serving.accounting import Account
from serving.local import LocalModel
from serving.modes.base import Generation, Mode


class LocalMode(Mode):
    """Zero sweeps."""

    name = "local"
    uses_hosts = False

    def __init__(self, model: LocalModel | None) -> None:
        self.model = model

    @property
    def problem(self) -> str:
        return "" if self.model else "the router has no local model (start it with a bundle that has local/)"

    @property
    def positions(self) -> int:
        return self.model.positions if self.model else 0

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        assert self.model is not None
        turns = self.model.generate(
            request.prompt, request.max_symbols, request.temperature, request.seed, request.deadline_unix_ms
        )
        async with aclosing(turns):
            async for text, compute_ms in turns:
                account.local_compute_ms += compute_ms
                account.add_text(text)
                yield text
