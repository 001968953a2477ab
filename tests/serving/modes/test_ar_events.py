"""A host's answer to a step: its tokens, the values that the request asks for, and no more."""

import math
import struct
from typing import Any

import pytest

from serving.modes.ar import check_tokens
from serving.modes.base import Generation
from stages.model.vocabulary import BYTES
from stages.v1 import stage_pb2
from stages.wire.status import StatusError


def packed(nats: Any = (-1.0, -2.0), top: bytes = b"xyxy", top_nats: Any = (-1.0, -2.0) * 2) -> stage_pb2.Logprobs:
    raw = (struct.pack(f"<{len(each)}f", *each) for each in (nats, top_nats))
    return stage_pb2.Logprobs(nats=next(raw), top_tokens=top, top_nats=next(raw))


def check(event: stage_pb2.Event, **asked: Any) -> None:
    request = Generation(prompt=b"x", max_tokens=9, due_at=0, **asked)
    check_tokens(event, request, BYTES, most=3)


def test_requested_results_are_accepted() -> None:
    check(stage_pb2.Event(text=b"ab"))
    check(stage_pb2.Event(text=b"ab", logprobs=packed()), logprobs=2)
    check(stage_pb2.Event(text=b"ab", logprobs=packed(top=b"", top_nats=())), logprobs=0)
    check(stage_pb2.Event(text=b"}", complete=True), json_schema="{}")


@pytest.mark.parametrize(
    ("event", "asked", "says"),
    [
        (stage_pb2.Event(text=b"abcd"), {}, "at most 3 tokens returned 4"),
        (stage_pb2.Event(text=b"ab", complete=True), {}, "reported the end of a schema"),
        (stage_pb2.Event(text=b"ab", logprobs=packed()), {}, "not requested"),
        (stage_pb2.Event(text=b"ab"), {"logprobs": 2}, "a wrong number of log-prob"),
        (stage_pb2.Event(text=b"ab", logprobs=packed()), {"logprobs": 1}, "a wrong number of log-prob"),
        (stage_pb2.Event(text=b"a", logprobs=packed()), {"logprobs": 2}, "a wrong number of log-prob"),
        (stage_pb2.Event(text=b"ab", logprobs=stage_pb2.Logprobs(nats=b"123")), {"logprobs": 0}, "a wrong number of"),
        (stage_pb2.Event(text=b"ab", logprobs=packed(nats=(math.nan, -1.0))), {"logprobs": 2}, "invalid log-prob"),
        (stage_pb2.Event(text=b"ab", logprobs=packed(nats=(0.5, -1.0))), {"logprobs": 2}, "invalid log-probabilities"),
    ],
)
def test_results_that_were_not_requested_are_refused(event: stage_pb2.Event, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(StatusError, match=says):
        check(event, **asked)
