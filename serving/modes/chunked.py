"""`chunked` and `sweep`: the chain of blocks denoises a chunk, or the whole output, in one trip."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from serving.accounting import Account
from serving.modes.base import DEFAULT_CHUNK, Generation, Mode
from serving.session import Session
from serving.view import RingView
from stages.refusal import Refusal
from stages.v1 import stage_pb2


class ChunkedMode(Mode):
    """One chunk a sweep, each conditioned on all bytes before it."""

    name = "chunked"

    def __init__(self, ring: RingView) -> None:
        self.ring = ring

    @property
    def problem(self) -> str:
        return "" if self.ring.model("chain") else "the hosts have no chain of blocks (no chain/ in their checkpoint)"

    @property
    def positions(self) -> int:
        model = self.ring.model("chain")
        return model.positions if model else 0

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        chunk = min(self._chunk(request), request.max_symbols)
        # the last chunk is never read back, so the hosts need not cache it
        capacity = len(request.prompt) + (request.max_symbols - 1) // chunk * chunk
        async with self.ring.session("chain", capacity, request.deadline_unix_ms, account) as session:
            clean, start, left, number = request.prompt, 0, request.max_symbols, 0
            while left:
                event = await _sweep(session, request, number, start, clean, min(chunk, left))
                account.add_sweep(event)
                account.add_text(event.text)
                yield event.text
                start, clean = start + len(clean), event.text
                left, number = left - len(event.text), number + 1

    def _chunk(self, request: Generation) -> int:
        return request.chunk or DEFAULT_CHUNK


class SweepMode(ChunkedMode):
    """The whole output as one chunk: one sweep."""

    name = "sweep"

    def _chunk(self, request: Generation) -> int:
        return request.max_symbols


async def _sweep(
    session: Session, request: Generation, number: int, start: int, clean: bytes, slots: int
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
        if len(event.text) != slots:
            raise Refusal(grpc.StatusCode.INTERNAL, f"a sweep for {slots} bytes came back with {len(event.text)}")

    return await session.event(check)
