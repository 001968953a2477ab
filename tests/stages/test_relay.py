"""The link to the next host: parcels and receipts, and what is said of a host that does not answer or refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from stages import relay as relays
from stages.refusal import Refusal, exhausted, invalid
from stages.relay import Relay
from stages.transport import new_server
from stages.v1 import stage_pb2, stage_pb2_grpc

HOP_TIMEOUT_S = 0.3
PATIENT_S = 20.0

Answer = Callable[[Any, stage_pb2.Parcel], Awaitable[stage_pb2.Receipt]]
Story = Callable[["Answering", Relay], Awaitable[Any]]


class Answering(stage_pb2_grpc.StageServiceServicer):
    """Answers parcels, and calls of Run, as it is told; keeps what came."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.parcels: list[stage_pb2.Parcel] = []
        self.streams = 0

    async def Push(self, parcels: AsyncIterator[stage_pb2.Parcel], context: Any) -> AsyncIterator[stage_pb2.Receipt]:
        self.streams += 1
        async for parcel in parcels:
            self.parcels.append(parcel)
            yield await self.answer(context, parcel)

    async def Run(self, request: stage_pb2.RunRequest, context: Any) -> stage_pb2.RunResponse:
        await self.answer(context, stage_pb2.Parcel(hops=[request.hop]))
        if request.onward:
            return stage_pb2.RunResponse(event=stage_pb2.Event(session=request.hop.session, text=b"end"))
        return stage_pb2.RunResponse(next=request.hop)

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.DescribeResponse:
        return stage_pb2.DescribeResponse(name="tokyo")

    @property
    def sessions(self) -> list[list[str]]:
        """Names of the hops of each parcel."""
        return [[hop.session for hop in parcel.hops] for parcel in self.parcels]


def with_relay(answer: Answer | None, story: Story, hop_timeout_s: float = PATIENT_S) -> Any:
    """Run a story with a server that answers so (None: a server without the service) and a relay to it."""

    async def run() -> Any:
        server, service = new_server(), Answering(answer or take)
        if answer is not None:
            stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        relay = Relay(f"127.0.0.1:{port}", 4 << 20, hop_timeout_s)
        try:
            return await asyncio.wait_for(story(service, relay), 30)
        finally:
            await relay.close()
            await server.stop(0)

    return asyncio.run(run())


def hop(session: str = "s", left_s: float = 60.0, payload: int = 0) -> stage_pb2.Hop:
    made = stage_pb2.Hop(session=session, deadline_unix_ms=int((time.time() + left_s) * 1000))
    if payload:
        made.sweep.estimate = bytes(payload)
    return made


def push_to(answer: Answer | None, left_s: float = 60.0, describe: bool = False, call: bool = False) -> Refusal:
    """What comes of a push to a server that answers so; `call`: of a Run."""

    async def story(service: Answering, relay: Relay) -> Refusal:
        if describe:
            await relay.describe(5.0)
        with pytest.raises(Refusal) as caught:
            await (relay.run(hop(left_s=left_s), onward=False) if call else relay.push(hop(left_s=left_s)))
        return caught.value

    return with_relay(answer, story, HOP_TIMEOUT_S if answer in (hang, None) else PATIENT_S)


async def take(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
    return stage_pb2.Receipt(number=parcel.number)


async def hang(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
    await asyncio.sleep(60)
    return stage_pb2.Receipt()


def rejecting(refusal: Refusal, indices: Sequence[int] = (0,)) -> Answer:
    """Takes a parcel, but for the hops at these places."""

    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        receipt = stage_pb2.Receipt(number=parcel.number)
        for index in indices:
            receipt.rejections.add(
                index=index,
                code=refusal.number,
                message=refusal.message,
                retry_after_ms=refusal.retry_after_ms or 0,
            )
        return receipt

    return answer


def aborting(refusal: Refusal) -> Answer:
    """Ends the call, or the whole stream."""

    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        await refusal.abort(context)

    return answer


async def crash(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
    raise RuntimeError("boom")


FULL = exhausted("tokyo has 64 hops under way", retry_after_ms=700)
LOADING = Refusal(grpc.StatusCode.UNAVAILABLE, "tokyo is still loading its weights")


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
            with pytest.raises(Refusal, match=r"cannot be reached \(.*refused\); see that it runs"):
                await relay.warm(10)
            return relay.rtt_ms
        finally:
            await relay.close()

    assert asyncio.run(run()) is None


# Parcels


class Heard:
    """What became of each hop, as `settled` told it."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.told: list[tuple[str, Refusal | None]] = []

    def send(self, made: stage_pb2.Hop) -> None:
        self.relay.send(made, lambda refusal: self.told.append((made.session, refusal)))

    async def all_of(self, count: int) -> dict[str, str]:
        """Codes by session, `ok` for those that were taken, once `count` hops have been settled; each once."""
        while len(self.told) < count:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        codes = {session: refusal.code.name if refusal else "ok" for session, refusal in self.told}
        assert len(codes) == len(self.told) == count, "a hop was settled twice"
        return codes


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
        assert (await heard.all_of(5))["e"] == "ok", "the stream goes on"
        assert service.streams == 1

    with_relay(rejecting(invalid("no"), indices=(1, 3)), story)


def test_a_full_host_is_worth_another_try_even_if_it_does_not_say_when() -> None:
    refusal = push_to(rejecting(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")))
    assert refusal.retry_after_ms == 1000
    assert push_to(rejecting(invalid("no"))).retry_after_ms is None


def test_a_receipt_that_makes_no_sense_settles_nothing_twice() -> None:
    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        receipt = stage_pb2.Receipt(number=parcel.number if parcel.number != 1 else 77)
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
    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        return stage_pb2.Receipt(
            number=parcel.number, rejections=[stage_pb2.Rejection(index=0, code=code, message="no")]
        )

    assert push_to(answer).code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK)


def test_parcels_are_closed_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "PARCEL_BYTES", 10_000)

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


# Streams that break


def test_hops_without_a_receipt_are_settled_once_when_the_stream_breaks() -> None:
    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        if parcel.number == 1:
            return stage_pb2.Receipt(number=1)
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
    monkeypatch.setattr(relays, "PARCEL_BYTES", 1)

    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
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
        async def Push(
            self, parcels: AsyncIterator[stage_pb2.Parcel], context: Any
        ) -> AsyncIterator[stage_pb2.Receipt]:
            self.streams += 1
            async for parcel in parcels:
                self.parcels.append(parcel)
                if self.streams < 3 and how == "abort":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
                if self.streams < 3:
                    return
                yield stage_pb2.Receipt(number=parcel.number)

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

    async def answer(context: Any, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        await gate.wait()
        return stage_pb2.Receipt(number=parcel.number)

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
