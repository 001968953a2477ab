"""A stage server over gRPC: health, readiness, and what it does with hops that make no sense."""

from __future__ import annotations

import re
import secrets
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.cli import main
from serving.deployment import free_port_block
from stages import loading
from stages.backends import Backend
from stages.parts import HostPlan, Parts, load_parts, plan_host
from stages.releases import Release, wiring_problem
from stages.samplers import SAMPLERS
from stages.server import SERVICE
from stages.transport import open_blocking_channel
from stages.v1 import stage_pb2, stage_pb2_grpc

ROUTER = "tester"
CAPACITY = 40
SESSION_BYTES = 3 * 2 * CAPACITY * 32 * 4
Until = Callable[..., Any]


class Rejected(Exception):
    """What a receipt says of a hop, in the shape of a failed call."""

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
        self.parcels = 0
        self.outgoing: SimpleQueue[stage_pb2.Parcel | None] = SimpleQueue()
        self.receipts: Iterator[stage_pb2.Receipt] | None = None

    def describe(self) -> stage_pb2.DescribeResponse:
        return self.stub.Describe(stage_pb2.DescribeRequest(), timeout=5, wait_for_ready=True)

    def serving(self, service: str) -> bool:
        answer = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5, wait_for_ready=True)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def subscribe(self) -> None:
        self.messages = iter(self.stub.Subscribe(stage_pb2.SubscribeRequest(router=ROUTER)))
        assert next(self.messages) == stage_pb2.Events()

    def send(self, *hops: stage_pb2.Hop) -> stage_pb2.Receipt:
        """A parcel over the stream; a stream that broke is opened anew."""
        if self.receipts is None:
            self.outgoing = SimpleQueue()
            self.receipts = self.stub.Push(iter(self.outgoing.get, None))
        self.parcels += 1
        self.outgoing.put(stage_pb2.Parcel(number=self.parcels, hops=hops))
        try:
            receipt = next(self.receipts)
        except grpc.RpcError:
            self.outgoing.put(None)
            self.receipts = None
            raise
        assert receipt.number == self.parcels
        return receipt

    def push(self, hop: stage_pb2.Hop) -> None:
        """One hop in a parcel of its own. Raises Rejected, or the error of the stream."""
        for rejection in self.send(hop).rejections:
            assert rejection.index == 0
            raise Rejected(rejection)

    def refusal(self, hop: stage_pb2.Hop) -> Rejected:
        with pytest.raises(Rejected) as caught:
            self.push(hop)
        return caught.value

    def run(self, hop: stage_pb2.Hop, onward: bool = False) -> stage_pb2.RunResponse:
        return self.stub.Run(stage_pb2.RunRequest(hop=hop, onward=onward), timeout=30)

    def event(self) -> stage_pb2.Event:
        assert self.messages is not None
        while not self.unread:
            self.unread.extend(next(self.messages).events)
        return self.unread.popleft()

    def event_of(self, session: str) -> stage_pb2.Event:
        """The next of this session: of one that ended in a fault there may be more on their way."""
        while (event := self.event()).session != session:
            pass
        return event

    def release(self, *sessions: str) -> int:
        return self.stub.Release(stage_pb2.ReleaseRequest(sessions=sessions), timeout=30).released


@contextmanager
def peer(address: str) -> Iterator[Peer]:
    with open_blocking_channel(address, 64 << 20) as channel:
        opened = Peer(address, channel)
        try:
            yield opened
        finally:
            opened.outgoing.put(None)


@pytest.fixture(scope="module")
def alone(bundles: Path, module_servers: Any, until: Until) -> Iterator[Peer]:
    """A subscriber of one host that holds all blocks, with memory for a few sessions."""
    address = f"127.0.0.1:{free_port_block(1)}"
    module_servers.stage(bundles / "own", (0, 1, 2), address, None, session_mb=1, name="alone")
    with peer(address) as opened:
        until(lambda: opened.describe().ready)
        opened.subscribe()
        yield opened


def sweep(digest: str, session: str = "s", **changes: Any) -> stage_pb2.Hop:
    request = stage_pb2.Hop(router=ROUTER, session=session, capacity=CAPACITY, digest=digest)
    request.deadline_unix_ms = int(time.time() * 1000) + 30_000
    fields = {"clean": b"The sea ", "slots": 16, "steps": 2, "codec": "int8", **changes}
    request.sweep.CopyFrom(stage_pb2.Sweep(**fields))
    return request


@pytest.fixture
def digest(alone: Peer) -> Iterator[str]:
    yield alone.describe().releases[-1].chain.digest
    alone.release("s", "t")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session of this test's own: a released one cannot be opened again."""
    return str(abs(hash(request.node.nodeid)))


# Health


def test_live_at_once_ready_when_the_next_host_is_reached(bundles: Path, servers: Any, until: Until) -> None:
    port = free_port_block(2)
    first, second = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    servers.stage(bundles / "own", (0, 1), first, second)
    with peer(first) as host:
        assert host.serving("")
        until(lambda: "cannot be reached" in host.describe().not_ready_reason)
        assert host.serving("")
        assert not host.serving(SERVICE)
        assert f"the host at {second} cannot be reached (" in host.describe().not_ready_reason

        other = servers.stage(bundles / "own", (2,), second, first)
        until(lambda: host.serving(SERVICE))
        assert host.describe().ready
        other.end()
        until(lambda: not host.serving(SERVICE))
        assert f"host stage-2 at {second} cannot be reached" in host.describe().not_ready_reason
        servers.stage(bundles / "own", (2,), second, first)
        until(lambda: host.serving(SERVICE))


def test_not_ready_before_the_weights_are(
    bundles: Path, servers: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def load(plan: HostPlan, backend: Backend, held: Sequence[Parts]) -> Parts:
        begun.wait(20)
        return load_parts(plan, backend, held)

    monkeypatch.setattr(loading, "load_parts", load)
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (0, 1, 2), address, None)
    with peer(address) as host:
        assert host.serving("")
        assert not host.serving(SERVICE)
        assert host.describe().not_ready_reason == "loading weights"
        assert host.refusal(sweep("")).code() is grpc.StatusCode.UNAVAILABLE
        begun.set()
        until(lambda: host.serving(SERVICE))


@pytest.mark.parametrize(
    ("checkpoint", "blocks", "says"),
    [
        ("other", (2,), "give every host the same checkpoint"),
        ("own", (0, 1), r"holds blocks \[0, 1\], block 2 must come next: check --next and --blocks"),
    ],
)
def test_a_wrong_neighbour_is_named(
    bundles: Path, servers: Any, until: Until, checkpoint: str, blocks: tuple[int, ...], says: str
) -> None:
    port = free_port_block(2)
    first, second = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    servers.stage(bundles / "own", (0, 1), first, second)
    servers.stage(bundles / checkpoint, blocks, second, first, name="other")
    with peer(first) as host:
        until(lambda: re.search(says, host.describe().not_ready_reason))
        assert not host.serving(SERVICE)
        if checkpoint == "other":
            with peer(second) as neighbour:
                digests = [peer.describe().releases[-1].chain.digest[:12] for peer in (host, neighbour)]
            assert all(digest in host.describe().not_ready_reason for digest in digests)


def test_a_part_of_the_ring_alone_is_never_ready(bundles: Path, servers: Any, until: Until) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (1,), address, None)
    with peer(address) as host:
        until(lambda: "give --next" in host.describe().not_ready_reason)


def test_wiring_is_checked_for_each_model(bundles: Path) -> None:
    plan = plan_host(bundles / "own", (0, 1))
    assert plan.chain is not None
    assert plan.ar is not None
    other = stage_pb2.DescribeResponse(name="b", blocks=[2])
    assert "b at x:1 says nothing of its weights" in wiring_problem([plan], "x:1", other)
    good = other.releases.add()
    good.chain.digest, good.ar.digest = plan.chain.digest, plan.ar.digest
    assert wiring_problem([plan], "x:1", other) == ""
    good.scorer.digest = "f" * 64
    assert "b at x:1 has the scorer checkpoint ffffffffffff, this host (none)" in wiring_problem([plan], "x:1", other)
    good.ClearField("scorer")
    good.ar.digest = ""
    assert "b at x:1 has the ar checkpoint (none), this host" in wiring_problem([plan], "x:1", other)


def test_neighbours_need_one_release_in_common(bundles: Path) -> None:
    old, new = (plan_host(bundles / name, (0, 1)) for name in ("own", "other"))
    other = stage_pb2.DescribeResponse(name="b", blocks=[2], releases=[Release("n", new).info()])
    assert "give every host the same checkpoint" in wiring_problem([old], "x:1", other)
    assert wiring_problem([old, new], "x:1", other) == wiring_problem([new, old], "x:1", other) == ""


def test_reflection_lists_the_services(alone: Peer) -> None:
    found = ProtoReflectionDescriptorDatabase(alone.channel).get_services()
    assert set(found) == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_a_host_describes_itself(alone: Peer) -> None:
    description = alone.describe()
    assert (description.name, list(description.blocks), list(description.links)) == ("alone", [0, 1, 2], [])
    (release,) = description.releases
    assert (len(release.name), release.loading) == (16, False)
    chain = release.chain
    assert (chain.parts, chain.context_bytes, chain.width) == (3, 512, 32)
    assert description.counters.session_bytes_limit == 1 << 20


# Hops


def test_a_sweep_comes_back_with_its_account(alone: Peer, digest: str, name: str) -> None:
    request = sweep(digest, name)
    alone.push(request)
    event = alone.event()
    assert (event.session, event.number, len(event.text)) == (name, 0, 16)
    (passage,) = event.passages
    assert (passage.host, passage.received_bytes) == ("alone", len(request.SerializeToString()))
    assert passage.compute_ms > 0
    assert alone.describe().counters.session_bytes == SESSION_BYTES
    alone.release(name, "nobody")
    assert alone.describe().counters.sessions == 0


def test_sweeps_are_taken_once_and_in_order(alone: Peer, digest: str, name: str) -> None:
    def later(number: int, start: int = 8) -> stage_pb2.Hop:
        return sweep(digest, name, number=number, clean_start=start, clean=b"and")

    alone.push(sweep(digest, name))
    alone.event()
    cases = [
        (sweep(digest, name), grpc.StatusCode.ALREADY_EXISTS),
        (later(2), grpc.StatusCode.FAILED_PRECONDITION),
        (later(1, start=9), grpc.StatusCode.FAILED_PRECONDITION),
        (sweep(digest, "unknown", number=1, clean_start=8), grpc.StatusCode.NOT_FOUND),
        (sweep(digest, name, number=1, clean_start=8, clean=bytes(33)), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for request, code in cases:
        assert alone.refusal(request).code() is code
    alone.push(later(1))
    assert alone.event().number == 1
    assert alone.refusal(later(1)).code() is grpc.StatusCode.ALREADY_EXISTS
    alone.release(name)
    assert alone.refusal(later(2, start=11)).code() is grpc.StatusCode.NOT_FOUND
    assert alone.refusal(sweep(digest, name)).code() is grpc.StatusCode.NOT_FOUND, "it was released"


def test_an_unknown_router_is_told_to_subscribe(alone: Peer, digest: str, name: str) -> None:
    request = sweep(digest, name)
    request.router = "somebody"
    error = alone.refusal(request)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "'somebody' does not listen here: subscribe first" in error.details()


def test_memory_for_sessions_is_bounded(alone: Peer, digest: str, name: str) -> None:
    opened = []
    for i in range((1 << 20) // SESSION_BYTES):
        opened.append(f"{name}{i}")
        alone.push(sweep(digest, opened[-1]))
        alone.event()
    error = alone.refusal(sweep(digest, name))
    alone.release(*opened)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no memory for another session" in error.details()
    assert error.retry_after_ms == 1000


def test_a_message_over_the_limit_is_not_read(alone: Peer, digest: str, name: str) -> None:
    with pytest.raises(grpc.RpcError, match="larger than max") as caught:
        alone.push(sweep(digest, name, estimate=bytes(8 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    alone.push(sweep(digest, name))
    assert alone.event().session == name, "a new stream is served"
    alone.release(name)


def test_an_idle_session_is_freed(bundles: Path, servers: Any, until: Until) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (0, 1, 2), address, None, lease_s=2.0)
    with peer(address) as host:
        until(lambda: host.describe().ready)
        host.subscribe()
        host.push(sweep(host.describe().releases[-1].chain.digest))
        assert len(host.event().text) == 16
        assert host.describe().counters.sessions == 1
        until(lambda: host.describe().counters.sessions == 0)


def test_sessions_end_with_their_router(bundles: Path, alone: Peer, digest: str, name: str, until: Until) -> None:
    gone = alone.stub.Subscribe(stage_pb2.SubscribeRequest(router="gone"))
    next(gone)
    request = sweep(digest, name)
    request.router = "gone"
    alone.push(request)
    assert [len(event.text) for event in next(gone).events] == [16]
    assert alone.describe().counters.sessions == 1
    gone.cancel()
    until(lambda: alone.describe().counters.sessions == 0, 3)


def test_a_subscription_needs_a_name(alone: Peer) -> None:
    with pytest.raises(grpc.RpcError, match="router must be 1 to 64") as caught:
        next(alone.stub.Subscribe(stage_pb2.SubscribeRequest(router="a\nb"), timeout=5))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Anything at all

anything = st.one_of(st.integers(0, 60), st.integers(0, 2**32 - 1))
large = st.integers(0, 2**64 - 1)
reads = st.lists(st.one_of(st.integers(0, 9), anything), max_size=4)
payload = st.one_of(st.binary(max_size=64), st.integers(0, 700).map(bytes))
sampling = st.builds(stage_pb2.Sampling, seed=large, temperature=st.one_of(st.floats(0, 2), st.floats()))
passages = st.lists(st.builds(stage_pb2.Passage, host=st.text(max_size=3), queue_ms=st.floats()), max_size=2)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "router": st.text(max_size=70),
        "session": st.text(max_size=70),
        "capacity": anything,
        "digest": st.text(max_size=64),
        "deadline_unix_ms": st.integers(-(2**63), 2**63 - 1),
        "passages": passages,
        "path": st.lists(st.sampled_from(["127.0.0.1:1", "there:2"]) | st.text(max_size=9), max_size=3),
        "place": st.one_of(st.integers(0, 3), anything),
        "request": st.text(max_size=70),
        "traceparent": st.sampled_from([f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'0' * 32}-{'b' * 16}-01"])
        | st.text(max_size=60),
    },
)
sweeps = st.fixed_dictionaries(
    {},
    optional={
        "number": large,
        "block": anything,
        "clean_start": anything,
        "clean": payload,
        "slots": anything,
        "steps": anything,
        "sampling": sampling,
        "codec": st.one_of(st.sampled_from(["fp32", "int8", "int4"]), st.text(max_size=8)),
        "estimate": payload,
        "features": payload,
        "sampler": st.one_of(st.sampled_from([*SAMPLERS, ""]), st.text(max_size=8)),
        "reads": reads,
    },
)
steps = st.fixed_dictionaries(
    {},
    optional={
        "number": large,
        "stage": anything,
        "start": anything,
        "clean": payload,
        "hidden": payload,
        "remaining": st.integers(0, 60),
        "sampling": sampling,
        "codec": st.one_of(st.sampled_from(["fp32", "int8"]), st.text(max_size=8)),
        "reads": reads,
        "draft": st.one_of(st.integers(0, 9), anything),
        "odds": payload
        | st.lists(st.floats(width=32), max_size=9).map(lambda odds: struct.pack(f"<{len(odds)}f", *odds)),
        "candidates": st.lists(st.binary(max_size=3), max_size=4)
        | st.tuples(st.integers(1, 300), st.integers(1, 40)).map(lambda size: [bytes(size[1])] * size[0]),
    },
)
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


good_candidates = st.tuples(st.integers(1, 40), st.integers(1, 30)).map(lambda size: [bytes(size[1])] * size[0])
scores = st.tuples(steps, good_candidates).map(lambda both: {"remaining": 1, **both[0], "candidates": both[1]})
guesses = st.integers(1, 6).map(lambda count: {"draft": count, "odds": struct.pack("<f", 0.5) * count})
verifications = st.tuples(steps, guesses).map(lambda both: {"remaining": 1, **both[0], **both[1]})
works = st.one_of(
    sweeps.map(lambda w: ("sweep", w)), st.one_of(steps, scores, verifications).map(lambda w: ("step", w))
)
OUTCOMES = {"text", "scores", "verdict"}


def nonsense(alone: Peer, digest: str, envelope: dict[str, Any], work: tuple[str, dict[str, Any]]) -> stage_pb2.Hop:
    """A good hop with any of its fields exchanged."""
    kind, fields = work
    request = sweep(digest, secrets.token_hex(8))
    if kind == "sweep":
        request.sweep.MergeFrom(stage_pb2.Sweep(**fields))
    else:
        request.digest = alone.describe().releases[-1].ar.digest
        request.step.CopyFrom(stage_pb2.Step(**{"clean": b"The sea ", "remaining": 3, "codec": "fp32", **fields}))
    request.MergeFrom(stage_pb2.Hop(**envelope))
    return request


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(envelope=envelopes, work=works)
def test_no_message_harms_a_host(
    alone: Peer, digest: str, envelope: dict[str, Any], work: tuple[str, dict[str, Any]]
) -> None:
    """It is refused for a reason, or computed."""
    request = nonsense(alone, digest, envelope, work)
    rejections = alone.send(request).rejections
    if rejections:
        assert Rejected(rejections[0]).code() in REFUSALS, rejections[0].message
        return
    event = alone.event_of(request.session)
    while event.WhichOneof("outcome") == "text" and event.number + 1 < request.step.remaining:
        event = alone.event_of(request.session)
    assert event.WhichOneof("outcome") in OUTCOMES or event.fault.code != grpc.StatusCode.INTERNAL.value[0]
    alone.release(request.session)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(envelope=envelopes, work=works, onward=st.booleans())
def test_no_call_harms_a_host(
    alone: Peer, digest: str, envelope: dict[str, Any], work: tuple[str, dict[str, Any]], onward: bool
) -> None:
    request = nonsense(alone, digest, envelope, work)
    refused: grpc.RpcError | None = None
    try:
        response = alone.run(request, onward)
    except grpc.RpcError as error:
        refused = error
    if refused is not None:
        assert refused.code() in REFUSALS, refused.details()
        return
    assert response.WhichOneof("outcome") == "event"
    assert response.event.WhichOneof("outcome") in OUTCOMES
    alone.release(request.session)


def test_hops_of_a_parcel_are_accepted_or_rejected_one_by_one(alone: Peer, digest: str, name: str) -> None:
    hops = [sweep(digest, f"{name}{i}", steps=2 if i % 2 == 0 else 999) for i in range(4)]
    hops[3].capacity, hops[3].digest = 0, "f" * 64
    rejections = alone.send(*hops).rejections
    assert [(rejection.index, rejection.code) for rejection in rejections] == [
        (1, grpc.StatusCode.INVALID_ARGUMENT.value[0]),
        (3, grpc.StatusCode.FAILED_PRECONDITION.value[0]),
    ]
    events = [alone.event(), alone.event()]
    assert {event.session for event in events} == {f"{name}0", f"{name}2"}
    assert [len(event.text) for event in events] == [16, 16]
    alone.release(*(hop.session for hop in hops))


def test_an_empty_parcel_gets_its_receipt(alone: Peer) -> None:
    assert alone.send().rejections == []


def test_two_hops_of_one_session_are_done_one_after_the_other(alone: Peer, digest: str, name: str) -> None:
    """A router may push ahead: the second hop reads on where the first ends, and no other session is harmed."""
    ar = alone.describe().releases[-1].ar.digest

    def steps(session: str) -> list[stage_pb2.Hop]:
        first, second = sweep(ar, session), sweep(ar, session)
        first.step.CopyFrom(stage_pb2.Step(clean=b"The sea was calm, an", remaining=1, codec="fp32"))
        second.step.CopyFrom(
            stage_pb2.Step(number=1, start=20, clean=b"d nobody spoke of it", remaining=1, codec="fp32")
        )
        return [first, second]

    expected = []
    for hop in steps(name):
        alone.push(hop)
        expected.append(alone.event().text)
    assert alone.send(*steps(f"{name}x"), sweep(digest, f"{name}y")).rejections == []
    events = {(event.session, event.number): event for event in (alone.event() for _ in range(3))}
    assert [events[f"{name}x", number].text for number in (0, 1)] == expected
    assert len(events[f"{name}y", 0].text) == 16
    alone.release(name, f"{name}x", f"{name}y")


@pytest.mark.parametrize("raw", [b"\xff" * 40, b"\x0a\x05ab", bytes(100)], ids=["ones", "cut", "zeros"])
@pytest.mark.parametrize("method", ["Push", "Run"])
def test_bytes_that_are_no_message(alone: Peer, digest: str, name: str, method: str, raw: bytes) -> None:
    """Those who sent them are told; another stream, and the host, live on."""
    alone.push(sweep(digest, name))
    assert alone.event().session == name
    if method == "Push":
        answers = alone.channel.stream_stream(f"/{SERVICE}/Push")(iter([raw]), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    else:
        with pytest.raises(grpc.RpcError) as caught:
            alone.channel.unary_unary(f"/{SERVICE}/Run")(raw, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert alone.serving(SERVICE)
    assert alone.refusal(sweep(digest, name)).code() is grpc.StatusCode.ALREADY_EXISTS, "over the stream of before"
    alone.release(name)


def test_and_a_good_request_is_still_served_right(alone: Peer, digest: str, name: str) -> None:
    texts = []
    for i in range(2):
        alone.push(sweep(digest, f"{name}{i}"))
        event = alone.event()
        texts.append(event.text)
    alone.release(f"{name}0", f"{name}1")
    assert texts[0] == texts[1]
    assert len(texts[0]) == 16


# The command


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--blocks", "0,2"], 2, "blocks 0,2 are not consecutive"),
        (["--blocks", "7"], 2, "block 7 does not exist: this checkpoint has blocks 0 to 2"),
        (["--blocks", "x"], 2, "--blocks 'x' must be numbers such as 0 or 0,1"),
        (["--blocks", ""], 2, "--blocks '' must be numbers"),
        (["--blocks", "0", "--listen", "0.0.0.0:0"], 2, "accept it with --insecure"),
        (["--blocks", "0", "--listen", "here"], 2, "'here' must be HOST:PORT"),
        (["--blocks", "0", "--next", "there"], 2, "next address 'there' must be HOST:PORT"),
        (["--blocks", "0", "--name", "a/b"], 2, "host name 'a/b' must be"),
        (["--blocks", "0", "--queue", "0"], 2, "--queue must be above 0"),
        (["--blocks", "0", "--batch", "0"], 2, "--batch must be above 0"),
        (["--blocks", "0", "--backend", "magic"], 2, "unknown backend 'magic'; choose from torch"),
        (["--blocks", "0", "--keep-warm-ms", "3"], 2, "--keep-warm-ms must be 0 (off) or 10 to 60000, not 3"),
        (["--blocks", "0", "--lease-s", "nan"], 2, "--lease-s must be above 0"),
        (["--blocks", "0", "--threads", "99999"], 2, "--threads must be at most"),
        (["--blocks", "0", "--checkpoint", "/nowhere"], 1, "no checkpoint in /nowhere"),
    ],
)
def test_a_wrong_option_is_explained(
    bundles: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    defaults = ["--checkpoint", str(bundles / "own"), "--listen", "127.0.0.1:0"]
    assert main(["stage", *defaults, *arguments]) == code
    _, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err


def damage(directory: Path, how: str) -> None:
    (path,) = (directory / "chain").glob("block-0-*.safetensors")
    raw = bytearray(path.read_bytes())
    manifest = directory / "chain" / "manifest.json"
    if how == "cut":
        path.write_bytes(raw[:-100])
    elif how == "flipped":
        raw[-50] ^= 4
        path.write_bytes(raw)
    elif how == "newer":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))


@pytest.mark.parametrize(
    ("how", "says"),
    [("cut", "its manifest says"), ("flipped", "it is damaged; fetch it again"), ("newer", "upgrade onesweep")],
)
def test_a_damaged_checkpoint_ends_the_server(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, says: str
) -> None:
    directory = Path(shutil.copytree(bundles / "own", tmp_path / "own"))
    damage(directory, how)
    assert main(["stage", "--checkpoint", str(directory), "--blocks", "0", "--listen", "127.0.0.1:0"]) == 1
    _, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err


def test_a_port_in_use(bundles: Path, alone: Peer) -> None:
    arguments = ["stage", "--checkpoint", str(bundles / "own"), "--blocks", "0", "--listen", alone.address]
    done = subprocess.run([sys.executable, "-m", "serving.cli", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"onesweep: cannot listen on {alone.address}: the port is in use" in done.stderr
    assert "Traceback" not in done.stderr
