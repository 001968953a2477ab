"""One choice of an answer: the text as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from serving.client import AsyncClient, RequestSettings, Result, RouterError, TextDecoder
from serving.http.costs import costs_of
from serving.http.order import Order


@dataclass(frozen=True)
class Piece:
    """Some text of a choice."""

    index: int
    text: str


@dataclass(frozen=True)
class End:
    """A choice is complete."""

    index: int
    result: Result

    @property
    def reason(self) -> str:
        return "stop" if self.result.stopped else "length"

    @property
    def costs(self) -> dict[str, Any]:
        return {"index": self.index, **costs_of(self.result)}


async def run_choice(
    client: AsyncClient, order: Order, index: int, named: Callable[[str], object], whole: bool
) -> AsyncGenerator[Piece | End, None]:
    """Pieces of one choice, then its End.

    :param named: hears first what the router calls the request.
    :param whole: in one piece.
    Raises OnesweepError.
    """
    decoder, result = TextDecoder(), None
    settings: RequestSettings = {**order.settings, "seed": order.seeds[index]}
    events = client.events(
        order.prompt,
        timeout_s=order.timeout_s,
        whole=whole,
        authorization=order.authorization,
        named=named,
        **settings,
    )
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Result):
                result = event
            elif isinstance(event, bytes) and (text := decoder.feed(event)):
                yield Piece(index, text)
    if result is None:
        raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
    if text := decoder.end():
        yield Piece(index, text)
    yield End(index, result)
