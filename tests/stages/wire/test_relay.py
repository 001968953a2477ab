"""The link to the next host: what is said of a host that does not answer or refuses."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from stages.v1 import stage_pb2
from stages.wire.hop_stream import Relay
from stages.wire.status import StatusError, exhausted
from tests.stages.scripted_server import (
    HOP_TIMEOUT_S,
    Answering,
    aborting,
    crash,
    hang,
    hop,
    push_to,
    rejecting,
    take,
    with_relay,
)

FULL = exhausted("tokyo has 64 hops under way", retry_after_ms=700)
LOADING = StatusError(grpc.StatusCode.UNAVAILABLE, "tokyo is still loading its weights")


def test_a_host_that_hangs_is_named_with_the_time_waited() -> None:
    refusal = push_to(hang)
    assert refusal.code is grpc.StatusCode.UNAVAILABLE
    assert refusal.message.startswith("the host at 127.0.0.1:")
    assert "did not answer within 0." in refusal.message
    assert "s; see that it runs" in refusal.message
    assert push_to(hang, describe=True).message.startswith("host tokyo at 127.0.0.1:")


@pytest.mark.parametrize("call", [False, True], ids=["push", "run"])
def test_a_deadline_is_not_the_hosts_fault(call: bool) -> None:
    refusal = push_to(hang, left_s=0.1, call=call)
    assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the deadline passed while" in refusal.message


@pytest.mark.parametrize("call", [False, True], ids=["push", "run"])
def test_a_refusal_is_handed_on(call: bool) -> None:
    refusing = aborting if call else rejecting
    refusal = push_to(refusing(FULL), describe=True, call=call)
    assert (refusal.code, refusal.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 700)
    assert refusal.message.startswith("host tokyo at 127.0.0.1:")
    assert refusal.message.endswith("refused: tokyo has 64 hops under way")
    loading = push_to(refusing(LOADING), call=call)
    assert (loading.code, loading.retry_after_ms) == (grpc.StatusCode.UNAVAILABLE, None)
    assert "did not answer" not in loading.message


def test_a_server_of_another_kind() -> None:
    assert "is no stage server" in push_to(None).message


@pytest.mark.parametrize("call", [False, True], ids=["push", "run"])
def test_a_crash_is_reported_as_such(call: bool) -> None:
    refusal = push_to(crash, call=call)
    assert refusal.code is grpc.StatusCode.UNKNOWN
    assert "failed: " in refusal.message


def test_a_run_brings_the_next_hop_or_the_end() -> None:
    async def story(service: Answering, relay: Relay) -> list[stage_pb2.Hop | stage_pb2.Event]:
        return [await relay.run(hop("a"), onward) for onward in (False, True)]

    following, end = with_relay(take, story)
    assert isinstance(following, stage_pb2.Hop)
    assert following.session == "a"
    assert isinstance(end, stage_pb2.Event)
    assert end.text == b"end"


def test_nobody_there() -> None:
    async def run() -> float | None:
        relay = Relay("127.0.0.1:1", 4 << 20, HOP_TIMEOUT_S)
        relay.rtt_ms = 1.0
        try:
            with pytest.raises(StatusError, match=r"cannot be reached \(.*refused\); see that it runs"):
                await relay.warm(10)
            return relay.rtt_ms
        finally:
            await relay.close()

    assert asyncio.run(run()) is None
