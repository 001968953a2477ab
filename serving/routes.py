"""How a sweep gets round: the ring, and two other ways that are there to be measured against it.

With `nested`, every host waits for the next one's answer and hands it back; with `router`, every hop starts and ends
at the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import grpc

from serving.paths import Path
from stages.alphabet import Alphabet
from stages.errors import InputError
from stages.hop import next_step
from stages.refusal import Refusal
from stages.v1 import stage_pb2

Route = Literal["ring", "nested", "router"]
ROUTES: tuple[Route, ...] = get_args(Route)


def check_route(text: str) -> Route:
    """`text` as a route. Raises InputError."""
    for route in ROUTES:
        if text == route:
            return route
    raise InputError(f"unknown route {text!r}; choose from {', '.join(ROUTES)}")


async def call_round(
    path: Path,
    hops: Sequence[stage_pb2.Hop],
    onward: bool,
    alphabet: Alphabet,
    deliver: Callable[[stage_pb2.Event], None],
) -> None:
    """Have the hosts do a sweep or step, and the AR steps after it, as calls that return; delivers each result, or a
    fault. `hops`: of the first, piece after piece."""
    *pieces, hop = hops
    try:
        for piece in pieces:
            await _around(path, piece, onward)
        event = await _around(path, hop, onward)
        deliver(event)
        while hop.WhichOneof("work") == "step" and hop.step.remaining > 1:
            hop = next_step(hop, event.text, alphabet)
            event = await _around(path, hop, onward)
            deliver(event)
    except Refusal as refusal:
        fault = stage_pb2.Fault(code=refusal.number, message=refusal.message)
        deliver(stage_pb2.Event(session=hop.session, fault=fault))


async def _around(path: Path, hop: stage_pb2.Hop, onward: bool) -> stage_pb2.Event:
    for link in path:
        outcome = await link.relay.run(hop, onward)
        if isinstance(outcome, stage_pb2.Event):
            return outcome
        hop = outcome
    raise Refusal(grpc.StatusCode.INTERNAL, "the last host handed a hop on instead of ending it")
