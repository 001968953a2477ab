"""`ar-speculative`: the AR pipeline confirms what a drafter at the router guessed, many symbols in one sweep.

Exact: every symbol is the one that the pipeline itself samples at its place, so the text is that of `ar`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

from serving.accounting import Account
from serving.drafting import BothDrafter, Drafter, DraftLength, LookupDrafter, ModelDrafter
from serving.local import LocalModel, LocalSequence
from serving.modes.ar import ArMode, check_symbols
from serving.modes.base import Generation
from serving.spelling import IN_BYTES
from serving.spellings import NO_TOKENS, Spellings
from serving.view import RingView
from stages.refusal import invalid
from stages.v1 import stage_pb2

DRAFTERS = ("both", "model", "lookup")


class SpeculativeMode(ArMode):
    """A sweep for each round of guesses; the router hears the result and guesses again."""

    name = "ar-speculative"

    def __init__(self, ring: RingView, local: LocalModel | None, spellings: Spellings = NO_TOKENS) -> None:
        super().__init__(ring, spellings)
        self._local = local
        self._lengths = {name: DraftLength() for name in DRAFTERS}

    @property
    def local(self) -> LocalModel | None:
        """The drafter that writes in the hosts' symbols, if there is one."""
        return self._local if self.spelling is IN_BYTES else None

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name = request.drafter or self._default(request)
        drafter, length = self._drafter(name, request), self._lengths[name]
        sampling = stage_pb2.Sampling(seed=request.seed, temperature=request.temperature)
        count_of, cut = self.spelling.alphabet.count, self.spelling.alphabet.cut
        capacity = count_of(request.prompt) + request.max_symbols - 1  # the last symbol is never read back
        async with self.ring.session("ar", capacity, request.deadline_unix_ms, account) as session:
            text, read, left, number = request.prompt, 0, request.max_symbols, 0
            while left:
                count = min(request.draft or length.best(), left - 1)
                guesses, draft_ms = await drafter.draft(text, count)
                drafted = count_of(guesses)
                begin = time.perf_counter()
                await session.push(
                    stage_pb2.Step(
                        number=number,
                        start=read,
                        clean=cut(text, read) + guesses,
                        remaining=1,
                        sampling=sampling,
                        codec=request.codec,
                        draft=drafted,
                    )
                )
                event = await session.event(partial(check_symbols, alphabet=self.spelling.alphabet, most=drafted + 1))
                right = count_of(event.text) - 1
                length.learn(drafted, right, draft_ms, (time.perf_counter() - begin) * 1000)
                account.add_sweep(event)
                account.add_draft(drafted, right, draft_ms)
                piece, ended = self._until_end(event.text, request.ends)
                account.add_text(piece)
                yield piece
                if ended:
                    return
                text, read, number = text + piece, count_of(text) + right, number + 1
                left -= right + 1

    def _until_end(self, written: bytes, ends: frozenset[int]) -> tuple[bytes, bool]:
        """`written` to its first symbol that ends a text, and whether there is one."""
        symbols = self.spelling.alphabet.symbols(written) if ends else []
        end = next((i for i, symbol in enumerate(symbols) if symbol in ends), None)
        return (written, False) if end is None else (self.spelling.alphabet.cut(written, 0, end + 1), True)

    def _default(self, request: Generation) -> str:
        room = self.local.positions if self.local else 0
        return "both" if len(request.prompt) + request.max_symbols <= room else "lookup"

    def _drafter(self, name: str, request: Generation) -> Drafter:
        if name == "lookup":
            return LookupDrafter(self.spelling.alphabet)
        if self.local is None:
            raise invalid(
                f"drafter {name!r} needs a local model that writes {self.spelling.noun}, as the hosts' does: start the "
                "router with a bundle that has local/, or choose drafter 'lookup'"
            )
        capacity = len(request.prompt) + request.max_symbols
        if capacity > self.local.positions:
            raise invalid(f"the drafter's context is {self.local.positions} bytes, {capacity} are needed")
        model = ModelDrafter(LocalSequence(self.local, capacity, request.temperature, request.seed))
        return model if name == "model" else BothDrafter(model)
