"""One choice of an answer: the text as it comes, cut where the request says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from serving.client import AsyncClient, RequestSettings, Result, RouterError, TextDecoder
from serving.http.costs import Tally, costs_of
from serving.http.order import Order
from serving.http.stop import StopCutter
from serving.v1 import router_pb2


@dataclass(frozen=True)
class Piece:
    """Some text of a choice."""

    index: int
    text: str


@dataclass(frozen=True)
class End:
    """A choice is complete."""

    index: int
    reason: Literal["stop", "length"]
    prompt_bytes: int
    output_bytes: int
    costs: dict[str, Any]


async def run_choice(
    client: AsyncClient, order: Order, index: int, named: Callable[[str], object], whole: bool
) -> AsyncGenerator[Piece | End, None]:
    """Pieces of one choice, then its End; a stop string cancels what the hosts still do for it.

    :param named: hears first what the router calls the request.
    :param whole: in one piece, where no stop string could end it sooner.
    Raises OnesweepError.
    """
    cutter, decoder, tally = StopCutter(order.stops), TextDecoder(), Tally()
    settings: RequestSettings = {**order.settings, "seed": order.seeds[index]}
    output, request = b"", ""
    result: Result | None = None

    def hear(name: str) -> None:
        nonlocal request
        request = name
        named(name)

    events = client.events(
        order.prompt,
        timeout_s=order.timeout_s,
        whole=whole and not order.stops,
        trips=bool(order.stops),
        authorization=order.authorization,
        named=hear,
        **settings,
    )
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Result):
                result, kept = event, cutter.end()
            elif isinstance(event, router_pb2.Trip):
                tally.add(event)
                continue
            else:
                kept = cutter.feed(event)
            output += kept
            if text := decoder.feed(kept):
                yield Piece(index, text)
            if cutter.stopped:
                break
    if result is None and not cutter.stopped:
        raise RouterError("the router ended the answer without an account", grpc.StatusCode.INTERNAL)
    if text := decoder.end():
        yield Piece(index, text)
    prompt_bytes = len(order.prompt.encode())
    told = {"mode": settings["mode"], "seed": settings["seed"], "request": request}
    costs = costs_of(result) if result else {**told, **tally.costs(prompt_bytes, output)}
    yield End(index, "stop" if cutter.stopped else "length", prompt_bytes, len(output), {"index": index, **costs})
