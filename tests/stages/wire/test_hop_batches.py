"""Hops to the next host in parcels, and their receipts."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from stages.v1 import stage_pb2
from stages.wire import hop_stream as relays
from stages.wire.hop_stream import Relay
from stages.wire.status import StatusError, invalid
from tests.stages.scripted_server import Answering, Heard, hop, push_to, rejecting, take, with_relay


def test_hops_that_are_sent_at_once_arrive_in_one_parcel_and_in_their_order() -> None:
    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        for name in "abc":
            heard.send(hop(name))
        assert await heard.all_of(3) == {"a": "ok", "b": "ok", "c": "ok"}
        heard.send(hop("d"))
        await heard.all_of(4)
        assert service.sessions == [["a", "b", "c"], ["d"]]
        assert [parcel.number for parcel in service.parcels] == [1, 2]
        assert service.streams == 1

    with_relay(take, story)


def test_a_rejected_hop_does_not_harm_the_others_of_its_parcel() -> None:
    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        for name in "abcd":
            heard.send(hop(name))
        assert await heard.all_of(4) == {"a": "ok", "b": "INVALID_ARGUMENT", "c": "ok", "d": "INVALID_ARGUMENT"}
        heard.send(hop("e"))
        assert (await heard.all_of(5))["e"] == "ok", "the stream continues"
        assert service.streams == 1

    with_relay(rejecting(invalid("no"), indices=(1, 3)), story)


def test_a_full_host_is_worth_another_try_even_if_it_does_not_say_when() -> None:
    refusal = push_to(rejecting(StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")))
    assert refusal.retry_after_ms == 1000
    assert push_to(rejecting(invalid("no"))).retry_after_ms is None


def test_a_receipt_that_makes_no_sense_settles_nothing_twice() -> None:
    async def answer(context: Any, parcel: stage_pb2.HopBatch) -> stage_pb2.Ack:
        receipt = stage_pb2.Ack(number=parcel.number if parcel.number != 1 else 77)
        receipt.rejections.add(index=9, code=4711, message="?")
        return receipt

    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        heard.send(hop("a", left_s=0.2))
        await heard.all_of(1)
        heard.send(hop("b"))
        assert await heard.all_of(2) == {"a": "DEADLINE_EXCEEDED", "b": "ok"}

    with_relay(answer, story)


@pytest.mark.parametrize("code", [4711, 0, -1])
def test_a_code_that_there_is_not_is_unknown(code: int) -> None:
    async def answer(context: Any, parcel: stage_pb2.HopBatch) -> stage_pb2.Ack:
        return stage_pb2.Ack(number=parcel.number, rejections=[stage_pb2.Rejection(index=0, code=code, message="no")])

    assert push_to(answer).code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK)


def test_parcels_are_closed_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "BATCH_BYTES", 10_000)

    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        for name in "abcdefg":
            heard.send(hop(name, payload=4_000))
        heard.send(hop("large", payload=30_000))
        heard.send(hop("last"))
        assert set((await heard.all_of(9)).values()) == {"ok"}
        assert service.sessions == [["a", "b", "c"], ["d", "e", "f"], ["g", "large"], ["last"]]

    with_relay(take, story)


def test_a_parcel_of_the_full_size_is_taken_by_a_host_with_the_usual_limit() -> None:
    """What a host accepts leaves room for a parcel, and for the largest hop on top of it."""

    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        for i in range(20):
            heard.send(hop(str(i), payload=300_000))
        assert set((await heard.all_of(20)).values()) == {"ok"}
        assert len(service.parcels) == 5
        assert [name for names in service.sessions for name in names] == [str(i) for i in range(20)]

    with_relay(take, story)


def test_a_parcel_has_few_hops_so_that_the_next_host_can_begin() -> None:
    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        for i in range(20):
            heard.send(hop(str(i)))
        assert set((await heard.all_of(20)).values()) == {"ok"}
        assert [len(names) for names in service.sessions] == [8, 8, 4]

    with_relay(take, story)
