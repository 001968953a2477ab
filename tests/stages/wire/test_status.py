"""Refusals: sentences for people, whatever somebody sent."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from stages.v1 import stage_pb2
from stages.wire.status import MAX_CHARACTERS, StatusError, invalid, made_printable


def test_a_long_message_is_truncated() -> None:
    refusal = invalid("x" * 10_000_000)
    assert refusal.message == str(refusal) == "x" * MAX_CHARACTERS + " ..."
    assert invalid("x" * MAX_CHARACTERS).message == "x" * MAX_CHARACTERS


EVIL, TAMED = "a\x1b[2J\nERROR all is lost\u202e", "a�[2J ERROR all is lost�"


def test_text_from_another_machine_is_made_printable() -> None:
    assert StatusError(grpc.StatusCode.INTERNAL, EVIL).message == TAMED
    info = stage_pb2.DescribeResponse(name=EVIL, blocks=[1], not_ready_reason=EVIL)
    info.links.add(problem=EVIL)
    info.releases.add(name=EVIL).steps.pictures.classes.extend(["sun", EVIL])
    (link,), (release,) = made_printable(info).links, info.releases
    assert {info.name, info.not_ready_reason, link.problem, release.name} == {TAMED}
    assert list(release.steps.pictures.classes) == ["sun", TAMED]
    assert list(info.blocks) == [1]


class Over:
    """The context of a call that ended while its refusal was on its way. Fuzzing met it; real ones are hard to time."""

    def trailing_metadata(self) -> None: ...

    async def abort(self, code: grpc.StatusCode, message: str, metadata: Any) -> None:
        assert all(value for _, value in metadata), "gRPC's protocol has no empty values"
        raise grpc.aio.InternalError("Failed to execute the batch")


def test_aborting_a_finished_call_cancels_its_handler() -> None:
    over: Any = Over()
    refusal = StatusError.numbered(0, "no")
    assert refusal.code is grpc.StatusCode.UNKNOWN, "no refusal has the code OK"
    with pytest.raises(asyncio.CancelledError):  # which gRPC takes for what it is
        asyncio.run(refusal.abort(over))
