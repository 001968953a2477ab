"""A test that talks to one host as routers and other hosts do."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel
from stages.wire.messages import PROTOCOL
from tests.conftest import PATIENCE_S

ROUTER = "tester"
CAPACITY = 40


class Rejected(Exception):
    """A hop's rejection in an ack, in the shape of a failed call."""

    def __init__(self, rejection: stage_pb2.Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection

    def code(self) -> grpc.StatusCode:
        return next(code for code in grpc.StatusCode if code.value[0] == self.rejection.code)

    def details(self) -> str:
        return self.rejection.message

    @property
    def retry_after_ms(self) -> int:
        return self.rejection.retry_after_ms


@dataclass
class Peer:
    """A test that talks to one host as routers and other hosts do."""

    address: str
    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.stub = stage_pb2_grpc.StageServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.messages: Iterator[stage_pb2.Events] | None = None
        self.unread: deque[stage_pb2.Event] = deque()
        self.batches = 0
        self.outgoing: SimpleQueue[stage_pb2.HopBatch | None] = SimpleQueue()
        self.acks: Iterator[stage_pb2.Ack] | None = None

    def describe(self) -> stage_pb2.DescribeResponse:
        return self.stub.Describe(stage_pb2.DescribeRequest(), timeout=5, wait_for_ready=True)

    def serving(self, service: str) -> bool:
        answer = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5, wait_for_ready=True)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def subscribe(self) -> None:
        self.messages = iter(self.stub.Subscribe(stage_pb2.SubscribeRequest(router=ROUTER)))
        assert next(self.messages) == stage_pb2.Events()

    def send(self, *hops: stage_pb2.Hop) -> stage_pb2.Ack:
        """A batch over the stream; a stream that broke is opened again."""
        if self.acks is None:
            self.outgoing = SimpleQueue()
            self.acks = self.stub.Push(iter(self.outgoing.get, None))
        self.batches += 1
        self.outgoing.put(stage_pb2.HopBatch(number=self.batches, hops=hops, protocol=PROTOCOL))
        try:
            ack = next(self.acks)
        except grpc.RpcError:
            self.outgoing.put(None)
            self.acks = None
            raise
        assert ack.number == self.batches
        return ack

    def push(self, hop: stage_pb2.Hop) -> None:
        """One hop in a batch of its own. Raises Rejected, or the error of the stream."""
        for rejection in self.send(hop).rejections:
            assert rejection.index == 0
            raise Rejected(rejection)

    def refusal(self, hop: stage_pb2.Hop) -> Rejected:
        with pytest.raises(Rejected) as caught:
            self.push(hop)
        return caught.value

    def event(self) -> stage_pb2.Event:
        while not self.unread:
            self.unread.extend(next(self.messages).events)
        return self.unread.popleft()

    def event_of(self, session: str) -> stage_pb2.Event:
        """The next of this session: of one that ended in a fault there may be more on their way."""
        while (event := self.event()).session != session:
            pass
        return event

    def release(self, *sessions: str) -> int:
        return self.stub.Release(stage_pb2.ReleaseRequest(sessions=sessions), timeout=PATIENCE_S).released


@contextmanager
def peer(address: str) -> Iterator[Peer]:
    sizes = [(f"grpc.max_{way}_message_length", 64 << 20) for way in ("send", "receive")]
    with open_blocking_channel(address, options=sizes) as channel:
        opened = Peer(address, channel)
        try:
            yield opened
        finally:
            opened.outgoing.put(None)


def sweep(digest: str, session: str = "s", **changes: Any) -> stage_pb2.Hop:
    request = stage_pb2.Hop(router=ROUTER, session=session, capacity=CAPACITY, digest=digest)
    request.left_s = 30
    fields = {"clean": b"The sea ", "slots": 16, "steps": 2, "codec": "int8", **changes}
    request.sweep.CopyFrom(stage_pb2.Sweep(**fields))
    return request
