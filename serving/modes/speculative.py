"""`ar-speculative`: the AR pipeline confirms what a drafter at the router guessed, many bytes in one sweep.

Exact: every byte is the one that the pipeline itself samples at its place, so the text is that of `ar`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

import grpc

from serving.accounting import Account
from serving.drafting import BothDrafter, Drafter, DraftLength, LookupDrafter, ModelDrafter
from serving.local import LocalModel, LocalSequence
from serving.modes.ar import ArMode
from serving.modes.base import Generation
from serving.view import RingView
from stages.refusal import Refusal, invalid
from stages.v1 import stage_pb2

DRAFTERS = ("both", "model", "lookup")


class SpeculativeMode(ArMode):
    """A sweep for each round of guesses; the router hears the result and guesses again."""

    name = "ar-speculative"

    def __init__(self, ring: RingView, local: LocalModel | None) -> None:
        super().__init__(ring)
        self.local = local
        self._lengths = {name: DraftLength() for name in DRAFTERS}

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name = request.drafter or self._default(request)
        drafter, length = self._drafter(name, request), self._lengths[name]
        sampling = stage_pb2.Sampling(seed=request.seed, temperature=request.temperature)
        capacity = len(request.prompt) + request.max_bytes - 1  # the last byte is never read back
        async with self.ring.session("ar", capacity, request.deadline_unix_ms, account) as session:
            text, read, left, number = request.prompt, 0, request.max_bytes, 0
            while left:
                count = min(request.draft or length.best(), left - 1)
                guesses, draft_ms = await drafter.draft(text, count)
                begin = time.perf_counter()
                await session.push(
                    stage_pb2.Step(
                        number=number,
                        start=read,
                        clean=text[read:] + guesses,
                        remaining=1,
                        sampling=sampling,
                        codec=request.codec,
                        draft=len(guesses),
                    )
                )
                event = await session.event(partial(_check_text, guesses=len(guesses)))
                length.learn(len(guesses), len(event.text) - 1, draft_ms, (time.perf_counter() - begin) * 1000)
                account.add_sweep(event)
                account.add_draft(len(guesses), len(event.text) - 1, draft_ms)
                account.add_text(event.text)
                yield event.text
                text, read, number = text + event.text, len(text) + len(event.text) - 1, number + 1
                left -= len(event.text)

    def _default(self, request: Generation) -> str:
        room = self.local.positions if self.local else 0
        return "both" if len(request.prompt) + request.max_bytes <= room else "lookup"

    def _drafter(self, name: str, request: Generation) -> Drafter:
        if name == "lookup":
            return LookupDrafter()
        if self.local is None:
            raise invalid(
                f"drafter {name!r} needs a local model: start the router with a bundle that has local/, "
                "or choose drafter 'lookup'"
            )
        capacity = len(request.prompt) + request.max_bytes
        if capacity > self.local.positions:
            raise invalid(f"the drafter's context is {self.local.positions} bytes, {capacity} are needed")
        model = ModelDrafter(LocalSequence(self.local, capacity, request.temperature, request.seed))
        return model if name == "model" else BothDrafter(model)


def _check_text(event: stage_pb2.Event, guesses: int) -> None:
    if not 1 <= len(event.text) <= guesses + 1:
        raise Refusal(grpc.StatusCode.INTERNAL, f"{guesses} guesses came back as {len(event.text)} bytes")
