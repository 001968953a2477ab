"""A text whose hosts may turn out to have lied: then it is written again, and goes on where it was right so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from serving.accounting import Account
from serving.modes import Generation, Mode
from serving.session import Betrayed
from stages.refusal import Refusal

MOST_TIMES = 3
PAUSE_S = 0.5
"""Where nobody could be named, another host may be there by then."""


async def truthful(mode: Mode, generation: Generation, account: Account) -> AsyncGenerator[bytes, None]:
    """Pieces of `mode`'s text for `generation`, none of it from hosts that were found to lie meanwhile.

    Raises Refusal: DATA_LOSS where what was handed out already was wrong.
    """
    sent = b""
    for _ in range(MOST_TIMES):
        written = b""
        try:
            async with aclosing(mode.generate(generation, account)) as pieces:
                async for piece in pieces:
                    written += piece
                    if not (written.startswith(sent) or sent.startswith(written)):
                        raise Refusal(
                            grpc.StatusCode.DATA_LOSS,
                            "a host lied, and the text so far was wrong: send the request again",
                        )
                    if len(written) > len(sent):
                        fresh, sent = written[len(sent) :], written
                        yield fresh
            return
        except Betrayed:
            account.begin_again()
            await asyncio.sleep(PAUSE_S)
    raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{MOST_TIMES} times a host of this request lied: look at the hosts")
