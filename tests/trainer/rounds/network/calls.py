"""Calls by hand to a coordinator: what they come to, and how they are refused."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from trainer.rounds.transfer import pieces
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    def whole() -> None:
        outcome = call()
        list(outcome if hasattr(outcome, "__iter__") else ())

    with pytest.raises(grpc.RpcError) as caught:
        whole()
    return caught.value.code(), caught.value.details()


def submit(network: Any, submission: Any, payload: bytes) -> Any:
    """Header and pieces at once, as nobody does who waits for the offset; the last answer."""
    requests = [rounds_pb2.SubmitRequest(submission=submission)]
    requests += [rounds_pb2.SubmitRequest(piece=piece) for piece in pieces(payload)]
    return list(network.stub.Submit(iter(requests), timeout=30))[-1].verdict
