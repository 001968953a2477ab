"""Streams to the next host that break, and hops that are late: each is settled once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire import hop_stream as relays
from stages.wire.channel import new_server
from stages.wire.hop_stream import Relay
from tests.stages.scripted_server import PATIENT_S, Answering, Heard, hang, hop, take, with_relay


def test_hops_without_a_receipt_are_settled_once_when_the_stream_breaks() -> None:
    async def answer(context: Any, parcel: stage_pb2.HopBatch) -> stage_pb2.Ack:
        if parcel.number == 1:
            return stage_pb2.Ack(number=1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        raise AssertionError

    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        heard.send(hop("before"))
        await heard.all_of(1)
        heard.send(hop("a"))
        heard.send(hop("b"))
        codes = await heard.all_of(3)
        assert codes == {"before": "ok", "a": "UNAVAILABLE", "b": "UNAVAILABLE"}
        assert all("cannot be reached (going down)" in refusal.message for _, refusal in heard.told if refusal)

    with_relay(answer, story)


def test_what_waits_behind_a_broken_parcel_is_settled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "BATCH_BYTES", 1)

    async def answer(context: Any, parcel: stage_pb2.HopBatch) -> stage_pb2.Ack:
        await context.abort(grpc.StatusCode.INTERNAL, "boom")
        raise AssertionError

    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        for i in range(50):
            heard.send(hop(str(i)))
        assert set((await heard.all_of(50)).values()) == {"INTERNAL"}

    with_relay(answer, story)


@pytest.mark.parametrize("how", ["abort", "end"])
def test_after_a_broken_stream_the_next_hop_opens_a_new_one(how: str) -> None:
    """And arrives: nothing of the old stream takes it."""

    class Breaking(Answering):
        async def Push(self, parcels: AsyncIterator[stage_pb2.HopBatch], context: Any) -> AsyncIterator[stage_pb2.Ack]:
            self.streams += 1
            async for parcel in parcels:
                self.parcels.append(parcel)
                if self.streams < 3 and how == "abort":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
                if self.streams < 3:
                    return
                yield stage_pb2.Ack(number=parcel.number)

    async def run() -> None:
        server, service = new_server(), Breaking(take)
        stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        relay = Relay(f"127.0.0.1:{port}", 4 << 20, PATIENT_S)
        heard = Heard(relay)
        try:
            for i, name in enumerate("abcd"):
                heard.send(hop(name))
                codes = await asyncio.wait_for(heard.all_of(i + 1), 10)
            assert codes == {"a": "UNAVAILABLE", "b": "UNAVAILABLE", "c": "ok", "d": "ok"}
            assert service.sessions == [["a"], ["b"], ["c"], ["d"]]
        finally:
            await relay.close()
            await server.stop(0)

    asyncio.run(run())


def test_a_host_that_comes_back_is_reached_again() -> None:
    async def run() -> dict[str, str]:
        first, second = new_server(), new_server()
        service = Answering(take)
        for server in (first, second):
            stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        port = first.add_insecure_port("127.0.0.1:0")
        await first.start()
        relay = Relay(f"127.0.0.1:{port}", 4 << 20, PATIENT_S)
        heard = Heard(relay)
        try:
            heard.send(hop("a"))
            await heard.all_of(1)
            service.answer = hang
            heard.send(hop("b"))
            while len(service.parcels) < 2:
                await asyncio.sleep(0.01)
            await first.stop(0)
            await heard.all_of(2)
            service.answer = take
            assert second.add_insecure_port(f"127.0.0.1:{port}") == port
            await second.start()
            heard.send(hop("c"))
            return await heard.all_of(3)
        finally:
            await relay.close()
            await second.stop(0)

    assert asyncio.run(run()) == {"a": "ok", "b": "UNAVAILABLE", "c": "ok"}


def test_a_hop_that_expired_before_it_left_does_not_leave() -> None:
    """Nobody listens yet, so that the stream cannot open before the first hop is late."""

    async def run() -> tuple[dict[str, str], list[list[str]]]:
        server, service = new_server(), Answering(take)
        stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        probe = new_server()
        port = probe.add_insecure_port("127.0.0.1:0")
        await probe.start()
        await probe.stop(0)
        relay = Relay(f"127.0.0.1:{port}", 4 << 20, PATIENT_S)
        heard = Heard(relay)
        try:
            heard.send(hop("late", left_s=0.1))
            assert await heard.all_of(1) == {"late": "DEADLINE_EXCEEDED"}
            assert server.add_insecure_port(f"127.0.0.1:{port}") == port
            await server.start()
            heard.send(hop("next"))
            return await heard.all_of(2), service.sessions
        finally:
            await relay.close()
            await server.stop(0)

    codes, sessions = asyncio.run(run())
    assert codes == {"late": "DEADLINE_EXCEEDED", "next": "ok"}
    assert ["next"] in [[name for name in names if name != "late"] for names in sessions]


def test_a_receipt_after_the_deadline_changes_nothing() -> None:
    gate = asyncio.Event()

    async def answer(context: Any, parcel: stage_pb2.HopBatch) -> stage_pb2.Ack:
        await gate.wait()
        return stage_pb2.Ack(number=parcel.number)

    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        heard.send(hop("late", left_s=0.15))
        assert await heard.all_of(1) == {"late": "DEADLINE_EXCEEDED"}
        gate.set()
        heard.send(hop("next"))
        assert await heard.all_of(2) == {"late": "DEADLINE_EXCEEDED", "next": "ok"}

    with_relay(answer, story)


@pytest.mark.parametrize("arrived", [True, False], ids=["under way", "not sent yet"])
def test_closing_settles_what_is_open(arrived: bool) -> None:
    async def story(service: Answering, relay: Relay) -> None:
        heard = Heard(relay)
        heard.send(hop("a"))
        while arrived and not service.parcels:
            await asyncio.sleep(0.01)
        heard.send(hop("b"))
        await relay.close()
        assert await asyncio.wait_for(heard.all_of(2), 5) == {"a": "UNAVAILABLE", "b": "UNAVAILABLE"}

    with_relay(hang, story)


def test_closing_what_was_never_used() -> None:
    async def story(service: Answering, relay: Relay) -> int:
        await relay.close()
        return service.streams

    assert with_relay(take, story) == 0
