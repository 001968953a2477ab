"""The link to the next host: hops over one stream, refusals, and streams that break. Each hop is settled once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire import hop_stream as relays
from stages.wire.channel import new_server
from stages.wire.status import StatusError, exhausted, invalid
from tests.conftest import eventually
from tests.stages.scripted_server import (
    Answering,
    aborting,
    crash,
    hang,
    hop,
    push,
    push_to,
    rejecting,
    relay_to,
    take,
)

FULL = exhausted("tokyo has 64 hops in flight", retry_after_ms=700)
LOADING = StatusError(grpc.StatusCode.UNAVAILABLE, "tokyo is still loading its weights")


def test_a_host_that_hangs_is_named_with_the_time_waited_and_a_crash_reported() -> None:
    refusal = push_to(hang)
    assert refusal.code is grpc.StatusCode.UNAVAILABLE
    assert refusal.message.startswith("the host at 127.0.0.1:")
    assert "did not answer within 0." in refusal.message
    assert "s; check that it runs" in refusal.message
    assert push_to(hang, describe=True).message.startswith("host tokyo at 127.0.0.1:")
    crashed = push_to(crash)
    assert (crashed.code, "failed: " in crashed.message) == (grpc.StatusCode.UNKNOWN, True)


@pytest.mark.parametrize("refusing", [rejecting, aborting], ids=["a hop", "the stream"])
def test_a_refusal_is_forwarded_with_its_code_and_retry_time(refusing: Any) -> None:
    refusal = push_to(refusing(FULL), describe=True)
    assert (refusal.code, refusal.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 700)
    assert refusal.message.startswith("host tokyo at 127.0.0.1:")
    assert refusal.message.endswith("refused: tokyo has 64 hops in flight")
    loading = push_to(refusing(LOADING))
    assert (loading.code, loading.retry_after_ms) == (grpc.StatusCode.UNAVAILABLE, None)
    assert "did not answer" not in loading.message


async def test_hops_sent_together_arrive_in_one_batch_and_in_order() -> None:
    async with relay_to(take) as (service, relay):
        relay.post(*map(hop, "abc"))
        assert await relay.all_of(3) == {"a": "ok", "b": "ok", "c": "ok"}
        relay.post(hop("d"))
        await relay.all_of(4)
        assert service.sessions == [["a", "b", "c"], ["d"]]
        assert [batch.number for batch in service.batches] == [1, 2]
        assert service.streams == 1


@pytest.mark.parametrize(("count", "batches"), [(9, [9]), (12, [6, 6]), (20, [10, 10]), (23, [8, 8, 7])])
async def test_many_hops_are_split_into_even_batches(count: int, batches: list[int]) -> None:
    async with relay_to(take) as (service, relay):
        relay.post(*(hop(str(number)) for number in range(count)))
        assert set((await relay.all_of(count)).values()) == {"ok"}
        assert list(map(len, service.sessions)) == batches


async def test_a_rejected_hop_does_not_affect_the_rest_of_its_batch() -> None:
    async with relay_to(rejecting(invalid("no"), indices=(1, 3))) as (service, relay):
        relay.post(*map(hop, "abcd"))
        assert await relay.all_of(4) == {"a": "ok", "b": "INVALID_ARGUMENT", "c": "ok", "d": "INVALID_ARGUMENT"}
        relay.post(hop("e"))
        assert (await relay.all_of(5))["e"] == "ok", "the stream continues"
        assert service.streams == 1


async def test_one_ack_settles_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1.0]
    monkeypatch.setattr(relays, "monotonic", lambda: clock[0])
    async with relay_to(take) as (service, relay):
        service.spares = True
        relay.post(hop("first"))
        await relay.all_of(1)
        relay.post(hop("small"))
        await eventually(lambda: len(service.batches) == 2)
        relay.post(hop("large", payload=relays.ACK_BYTES))
        await relay.all_of(3)
        relay.post(hop("last"))
        await eventually(lambda: len(service.batches) == 4)
        clock[0] += 2 * relay.hop_timeout_s / relays.TICKS
        relay._tick()
        assert set((await relay.all_of(4)).values()) == {"ok"}
    assert service.sessions == [["first"], ["small"], ["large"], ["last"], []]
    assert [batch.quiet for batch in service.batches] == [False, True, False, True, False]


async def test_an_invalid_ack_settles_no_hop_twice() -> None:
    async def answer(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
        ack = stage_pb2.Ack(number=batch.number if batch.hops[0].session != "a" else 77)
        ack.rejections.add(index=9, code=4711, message="?")
        return ack

    async with relay_to(answer) as (_, relay):
        relay.post(hop("a", left_s=0.2))
        await relay.all_of(1)
        relay.post(hop("b"))
        assert await relay.all_of(2) == {"a": "DEADLINE_EXCEEDED", "b": "ok"}


async def test_a_full_batch_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "BATCH_BYTES", 10_000)

    async with relay_to(take) as (service, relay):
        relay.post(*(hop(name, payload=4_000) for name in "abcdefg"))
        relay.post(hop("large", payload=30_000), hop("last"))
        assert set((await relay.all_of(9)).values()) == {"ok"}
        assert service.sessions == [["a", "b", "c"], ["d", "e", "f"], ["g", "large"], ["last"]]


@pytest.mark.parametrize(
    ("bytes_per_s", "message_bytes", "sent"),
    [
        (1e9, 8 << 20, [0, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20]),
        (5e5, 8 << 20, [0, 1 << 15, 1 << 16, 1 << 17]),
        (1e4, 8 << 20, [0, 1 << 15]),
        (1e9, 8 << 15, [0, 1 << 15]),
    ],
    ids=["fast", "4 Mbit/s", "slow", "small messages"],
)
async def test_a_new_link_is_warmed_as_far_as_its_speed_allows(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, message_bytes: int, sent: list[int]
) -> None:
    async with relay_to(take) as (service, relay):
        relay._message_bytes = message_bytes
        monkeypatch.setattr(relays, "monotonic", lambda: sum(service.warmed) / bytes_per_s)
        await relay.open_up()
        assert service.warmed == sent


async def test_hops_without_an_ack_fail_once_when_the_stream_breaks() -> None:
    async def answer(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
        if batch.number == 1:
            return stage_pb2.Ack(number=1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        raise AssertionError

    async with relay_to(answer) as (_, relay):
        relay.post(hop("before"))
        await relay.all_of(1)
        relay.post(hop("a"), hop("b"))
        codes = await relay.all_of(3)
        assert codes == {"before": "ok", "a": "UNAVAILABLE", "b": "UNAVAILABLE"}
        assert all("cannot be reached (going down)" in refusal.message for _, refusal in relay.outcomes if refusal)


@pytest.mark.parametrize("how", ["abort", "end"])
async def test_the_next_hop_after_a_broken_stream_opens_a_new_one(how: str) -> None:
    """And arrives: nothing of the old stream takes it."""

    class Breaking(Answering):
        async def Push(self, batches: AsyncIterator[stage_pb2.HopBatch], context: Any) -> AsyncIterator[stage_pb2.Ack]:
            async for ack in super().Push(batches, context):
                if self.streams < 3 and how == "abort":
                    await context.abort(grpc.StatusCode.CANCELLED, "going down")
                if self.streams < 3:
                    return
                yield ack

    async with relay_to(Breaking(take)) as (service, relay):
        for i, name in enumerate("abcd"):
            relay.post(hop(name))
            codes = await asyncio.wait_for(relay.all_of(i + 1), 10)
        assert codes == {"a": "UNAVAILABLE", "b": "UNAVAILABLE", "c": "ok", "d": "ok"}
        assert service.sessions == [["a"], ["b"], ["c"], ["d"]]


async def test_an_expired_hop_is_not_sent() -> None:
    """No server listens yet, so that the stream cannot open before the first hop is late."""
    async with relay_to(take) as (service, relay):
        server = new_server()
        stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        await service.server.stop(0)
        relay.post(hop("late", left_s=0.1))
        assert await relay.all_of(1) == {"late": "DEADLINE_EXCEEDED"}
        server.add_insecure_port(relay.address)
        await server.start()
        relay.post(hop("next"))
        assert await relay.all_of(2) == {"late": "DEADLINE_EXCEEDED", "next": "ok"}
        assert ["next"] in [[name for name in names if name != "late"] for names in service.sessions]
        await server.stop(0)


@pytest.mark.parametrize("arrived", [True, False], ids=["under way", "not sent yet"])
async def test_closing_fails_hops_under_way(arrived: bool) -> None:
    async with relay_to(hang) as (service, relay):
        relay.post(hop("a"))
        await eventually(lambda: service.batches or not arrived)
        relay.post(hop("b"))
        await relay.close()
        assert await asyncio.wait_for(relay.all_of(2), 5) == {"a": "UNAVAILABLE", "b": "UNAVAILABLE"}


async def test_a_link_in_use_is_kept_warm_with_small_messages() -> None:
    async with relay_to(take) as (service, relay):
        warmer = asyncio.create_task(relay.keep_warm(1000, 0.01))
        sizes = await service.warmed_more(3)
        warmer.cancel()
    assert sizes[:4] == [1000, 0, 0, 0]


@pytest.mark.parametrize("by", ["the router", "a hop"])
async def test_an_idle_link_is_not_warmed_until_it_is_used(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(relays, "IDLE_AFTER_S", 0.0)
    monkeypatch.setattr(relays, "IDLE_PAUSE_S", 3600.0)
    async with relay_to(take) as (service, relay):
        warmer = asyncio.create_task(relay.keep_warm(1000, 0.0))
        await service.warmed_more(0)
        await push(relay, hop("a"))  # it needs far longer than the pause of a link in use
        for _ in range(3):
            before = len(service.warmed)
            if by == "a hop":
                await push(relay, hop("b"))
            else:
                relay.wake()
            await service.warmed_more(before)
        warmer.cancel()
    assert set(service.warmed) == {1000}
    assert len(service.warmed) <= 2 + 3


@pytest.mark.parametrize(("answer", "says"), [(aborting(FULL), "refused: tokyo has 64 hops"), (crash, "boom")])
async def test_a_lost_stream_is_reported_with_its_cause(answer: Any, says: str) -> None:
    async with relay_to(answer) as (_, relay):
        call = relay.stub.Push()
        await call.write(stage_pb2.HopBatch(hops=[hop()]))
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call.read()
        assert says in relay.loss(lost.value)
