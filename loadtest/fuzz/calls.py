"""Calls with raw bytes, and what may come of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from loadtest.fuzz.findings import Tally

T = TypeVar("T")
_Code = grpc.StatusCode
FINE = {
    _Code.OK,
    _Code.CANCELLED,
    _Code.INVALID_ARGUMENT,
    _Code.DEADLINE_EXCEEDED,
    _Code.NOT_FOUND,
    _Code.ALREADY_EXISTS,
    _Code.PERMISSION_DENIED,
    _Code.RESOURCE_EXHAUSTED,
    _Code.FAILED_PRECONDITION,
    _Code.UNAVAILABLE,
    _Code.UNAUTHENTICATED,
    _Code.UNIMPLEMENTED,
}
"""What a server may say to a bad message. UNKNOWN, INTERNAL and the rest mean that it did not expect it."""
FINE_NUMBERS = {code.value[0] for code in FINE}
CALL_S = 20.0
"""Deadline of a call that is to be answered at once."""
MARGIN_S = 10.0
"""By how much a call may outlive its deadline, on a machine that is busy."""


class Caller:
    """Sends raw bytes to one server, and books how each call ends."""

    def __init__(self, address: str, tally: Tally) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self.tally = tally

    async def unary(self, method: str, data: bytes, timeout_s: float = CALL_S) -> bytes | None:
        """The answer; None where there is none."""
        call: Any = self.channel.unary_unary(method)
        answer: bytes | None = await self._judged(call(data, timeout=timeout_s), method, data, timeout_s)
        return answer

    async def read(
        self,
        method: str,
        data: bytes,
        most: int,
        timeout_s: float,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> list[bytes]:
        """Up to `most` messages of an answer that is a stream; then it is left."""
        make: Any = self.channel.unary_stream(method)
        call = make(data, timeout=timeout_s, metadata=tuple(metadata))
        return await self._judged(_some(call, most), method, data, timeout_s, is_patient=True) or []

    async def stream(
        self, method: str, parts: Sequence[bytes], most: int, timeout_s: float = CALL_S, is_half: bool = False
    ) -> list[bytes]:
        """Send a stream and read up to `most` answers. `is_half`: never say that it is complete."""

        async def sent() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
            if is_half:
                await asyncio.sleep(timeout_s)

        make: Any = self.channel.stream_stream(method)
        call = make(sent(), timeout=timeout_s)
        return await self._judged(_some(call, most), method, b"".join(parts[:1]), timeout_s) or []

    async def close(self) -> None:
        await self.channel.close()

    async def _judged(
        self, call: Awaitable[T], method: str, data: bytes, timeout_s: float, is_patient: bool = False
    ) -> T | None:
        """:param is_patient: whether an answer may take until the deadline."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                answer = await call
        except grpc.aio.AioRpcError as error:
            code = error.code()
            self.tally.answer(code.name)
            if code not in FINE:
                self.tally.finding(f"{method} answers {code.name}: {_shape(error.details() or '')}", data)
            elif code is _Code.DEADLINE_EXCEEDED and not is_patient and time.monotonic() - begin >= timeout_s:
                self.tally.finding(f"{method} does not answer within {timeout_s:g} s", data)
        except TimeoutError:
            self.tally.answer("HANG")
            self.tally.finding(f"{method} outlives its deadline of {timeout_s:g} s", data)
        else:
            self.tally.answer("OK")
            return answer
        return None


async def _some(call: Any, most: int) -> list[bytes]:  # noqa: ANN401
    found: list[bytes] = []
    try:
        if most:
            async for answer in call:
                found.append(answer)
                if len(found) >= most:
                    break
        return found
    finally:
        call.cancel()


def _shape(details: str) -> str:
    """A sentence without what differs from input to input."""
    return "".join("0" if letter.isdigit() else letter for letter in details)[:120]
