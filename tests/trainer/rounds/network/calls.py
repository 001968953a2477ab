"""Calls by hand to a coordinator: what they come to, and how they are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from tests.conftest import PATIENCE_S
from trainer.rounds.transfer import piece_at
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    def whole() -> None:
        outcome = call()
        list(outcome if hasattr(outcome, "__iter__") else ())

    with pytest.raises(grpc.RpcError) as caught:
        whole()
    return caught.value.code(), caught.value.details()


def pieces(data: bytes, offset: int = 0) -> Iterator[rounds_pb2.Piece]:
    """`data` from `offset` on."""
    while (piece := piece_at(data, offset)) is not None:
        yield piece
        offset += len(piece.data)


def submit(network: Any, submission: Any, payload: bytes) -> Any:
    """Header and pieces at once, as nobody does who waits for the offset; the last answer."""
    requests = [rounds_pb2.SubmitRequest(submission=submission)]
    requests += [rounds_pb2.SubmitRequest(piece=piece) for piece in pieces(payload)]
    return list(network.stub.Submit(iter(requests), timeout=PATIENCE_S))[-1].verdict
