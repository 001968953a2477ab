"""`ar`: the AR pipeline over the same hosts. The last host samples; one byte costs one trip round the ring."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from serving.accounting import Account
from serving.modes.base import Generation, Mode
from serving.view import RingView
from stages.admission import HIDDEN
from stages.refusal import Refusal
from stages.v1 import stage_pb2


class ArMode(Mode):
    """Token by token, KV-cached. The last host hands each byte to the first host and to the router at once."""

    name = "ar"
    codecs = tuple(HIDDEN)
    default_codec = "fp32"

    def __init__(self, ring: RingView) -> None:
        self.ring = ring

    @property
    def problem(self) -> str:
        return "" if self.ring.model("ar") else "the hosts have no AR model (no ar/ in their checkpoint)"

    @property
    def context_bytes(self) -> int:
        model = self.ring.model("ar")
        return model.positions if model else 0

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        capacity = len(request.prompt) + request.max_bytes - 1  # the last byte is never read back
        async with self.ring.session("ar", capacity, request.deadline_unix_ms, account) as session:
            await session.push(
                stage_pb2.Step(
                    clean=request.prompt,
                    remaining=request.max_bytes,
                    sampling=stage_pb2.Sampling(seed=request.seed, temperature=request.temperature),
                    codec=request.codec,
                )
            )
            for _ in range(request.max_bytes):
                event = await session.event(check_byte)
                account.add_sweep(event)
                account.add_text(event.text)
                yield event.text


def check_byte(event: stage_pb2.Event) -> None:
    """Raise Refusal unless `event` brings a byte."""
    if len(event.text) != 1:
        raise Refusal(grpc.StatusCode.INTERNAL, f"a step came back with {len(event.text)} bytes")
