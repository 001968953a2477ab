"""Bytes that are no HTTP/2, on a port where gRPC listens."""

from __future__ import annotations

import asyncio
import contextlib
import random

from loadtest.fuzz.calls import MARGIN_S
from loadtest.fuzz.findings import Tally
from loadtest.fuzz.mutation import damaged

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
ENOUGH_S = 1.0


async def garbage(address: str, rng: random.Random, tally: Tally) -> None:
    """Connect, send, read what comes for a moment, leave. The server may say what it likes, but it must go on."""
    host, _, port = address.rpartition(":")
    data = rng.choice((rng.randbytes(200), damaged(rng, PREFACE), PREFACE + rng.randbytes(100)))
    with contextlib.suppress(OSError):
        async with asyncio.timeout(MARGIN_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                writer.write_eof()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), ENOUGH_S)
            finally:
                writer.close()
    tally.answer("port")
