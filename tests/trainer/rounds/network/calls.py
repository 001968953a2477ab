"""Calls to a coordinator, made by hand."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.conftest import PATIENCE_S
from trainer.rounds.transfer import piece_at
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]


def pieces(data: bytes, offset: int = 0) -> Iterator[rounds_pb2.Piece]:
    """`data` from `offset` on."""
    while (piece := piece_at(data, offset)) is not None:
        yield piece
        offset += len(piece.data)


def submit(network: Any, submission: Any, payload: bytes) -> Any:
    """Header and pieces at once, without waiting for the offset; the last answer."""
    requests = [rounds_pb2.SubmitRequest(submission=submission)]
    requests += [rounds_pb2.SubmitRequest(piece=piece) for piece in pieces(payload)]
    return list(network.stub.Submit(iter(requests), timeout=PATIENCE_S))[-1].verdict
