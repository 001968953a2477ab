"""A stage server over gRPC: health, readiness, and what it does with hops that make no sense."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.cli import main
from serving.deployment import free_port_block
from stages import server
from stages.parts import HostPlan, Parts, load_parts, plan_host
from stages.refusal import RETRY_AFTER, trailing
from stages.server import SERVICE, wiring_problem
from stages.transport import open_blocking_channel
from stages.v1 import stage_pb2, stage_pb2_grpc

ROUTER = "tester"
CAPACITY = 40
SESSION_BYTES = 3 * 2 * CAPACITY * 32 * 4
Until = Callable[..., Any]


@dataclass
class Peer:
    """A test that talks to one host as routers and other hosts do."""

    address: str
    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.stub = stage_pb2_grpc.StageServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.events: Iterator[stage_pb2.Event] | None = None

    def describe(self) -> stage_pb2.DescribeResponse:
        return self.stub.Describe(stage_pb2.DescribeRequest(), timeout=5, wait_for_ready=True)

    def serving(self, service: str) -> bool:
        answer = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5, wait_for_ready=True)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def subscribe(self) -> None:
        self.events = iter(self.stub.Subscribe(stage_pb2.SubscribeRequest(router=ROUTER)))
        assert next(self.events) == stage_pb2.Event()

    def push(self, request: stage_pb2.PushRequest) -> None:
        self.stub.Push(request, timeout=5)

    def refusal(self, request: stage_pb2.PushRequest) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            self.push(request)
        return caught.value

    def event(self) -> stage_pb2.Event:
        assert self.events is not None
        return next(self.events)


@contextmanager
def peer(address: str) -> Iterator[Peer]:
    with open_blocking_channel(address, 64 << 20) as channel:
        yield Peer(address, channel)


@pytest.fixture(scope="module")
def alone(bundles: Path, module_servers: Any, until: Until) -> Iterator[Peer]:
    """A subscriber of one host that holds all blocks, with memory for a few sessions."""
    address = f"127.0.0.1:{free_port_block(1)}"
    module_servers.stage(bundles / "own", (0, 1, 2), address, None, session_mb=1, name="alone")
    with peer(address) as opened:
        until(lambda: opened.describe().ready)
        opened.subscribe()
        yield opened


def sweep(digest: str, session: str = "s", **changes: Any) -> stage_pb2.PushRequest:
    request = stage_pb2.PushRequest(router=ROUTER, session=session, capacity=CAPACITY, digest=digest)
    request.deadline_unix_ms = int(time.time() * 1000) + 30_000
    fields = {"clean": b"The sea ", "slots": 16, "steps": 2, "codec": "int8", **changes}
    request.sweep.CopyFrom(stage_pb2.Sweep(**fields))
    return request


@pytest.fixture
def digest(alone: Peer) -> Iterator[str]:
    yield alone.describe().chain.digest
    alone.stub.Release(stage_pb2.ReleaseRequest(sessions=["s", "t"]))


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
    loading = threading.Event()

    def load(plan: HostPlan) -> Parts:
        loading.wait(20)
        return load_parts(plan)

    monkeypatch.setattr(server, "load_parts", load)
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (0, 1, 2), address, None)
    with peer(address) as host:
        assert host.serving("")
        assert not host.serving(SERVICE)
        assert host.describe().not_ready_reason == "loading weights"
        assert host.refusal(sweep("")).code() is grpc.StatusCode.UNAVAILABLE
        loading.set()
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
                digests = [host.describe().chain.digest[:12], neighbour.describe().chain.digest[:12]]
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
    good = stage_pb2.DescribeResponse(name="b", blocks=[2])
    good.chain.digest, good.ar.digest = plan.chain.digest, plan.ar.digest
    assert wiring_problem(plan, "x:1", good) == ""
    good.ar.digest = ""
    assert "b at x:1 has the ar checkpoint (none), this host" in wiring_problem(plan, "x:1", good)


def test_reflection_lists_the_services(alone: Peer) -> None:
    found = ProtoReflectionDescriptorDatabase(alone.channel).get_services()
    assert set(found) == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_a_host_describes_itself(alone: Peer) -> None:
    description = alone.describe()
    assert (description.name, list(description.blocks), description.next_address) == ("alone", [0, 1, 2], "")
    assert (description.chain.parts, description.chain.context_bytes, description.chain.width) == (3, 512, 32)
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
    alone.stub.Release(stage_pb2.ReleaseRequest(sessions=[name, "nobody"]))
    assert alone.describe().counters.sessions == 0


def test_sweeps_are_taken_once_and_in_order(alone: Peer, digest: str, name: str) -> None:
    def later(number: int, start: int = 8) -> stage_pb2.PushRequest:
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
    alone.stub.Release(stage_pb2.ReleaseRequest(sessions=[name]))
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
    alone.stub.Release(stage_pb2.ReleaseRequest(sessions=opened))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no memory for another session" in error.details()
    assert trailing(error)[RETRY_AFTER] == "1000"


def test_a_message_over_the_limit_is_not_read(alone: Peer, digest: str, name: str) -> None:
    error = alone.refusal(sweep(digest, name, estimate=bytes(8 << 20)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()


def test_an_idle_session_is_freed(bundles: Path, servers: Any, until: Until) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (0, 1, 2), address, None, lease_s=0.3)
    with peer(address) as host:
        until(lambda: host.describe().ready)
        host.subscribe()
        host.push(sweep(host.describe().chain.digest))
        assert len(host.event().text) == 16
        assert host.describe().counters.sessions == 1
        until(lambda: host.describe().counters.sessions == 0, 3)


def test_sessions_end_with_their_router(bundles: Path, alone: Peer, digest: str, name: str, until: Until) -> None:
    gone = alone.stub.Subscribe(stage_pb2.SubscribeRequest(router="gone"))
    next(gone)
    request = sweep(digest, name)
    request.router = "gone"
    alone.push(request)
    assert len(next(gone).text) == 16
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(envelope=envelopes, work=st.one_of(sweeps.map(lambda w: ("sweep", w)), steps.map(lambda w: ("step", w))))
def test_no_message_harms_a_host(
    alone: Peer, digest: str, envelope: dict[str, Any], work: tuple[str, dict[str, Any]]
) -> None:
    """A good hop with any of its fields exchanged is refused for a reason, or computed."""
    kind, fields = work
    request = sweep(digest, secrets.token_hex(8))
    if kind == "sweep":
        request.sweep.MergeFrom(stage_pb2.Sweep(**fields))
    else:
        request.digest = alone.describe().ar.digest
        request.step.CopyFrom(stage_pb2.Step(**{"clean": b"The sea ", "remaining": 3, **fields}))
    request.MergeFrom(stage_pb2.PushRequest(**envelope))
    refused: grpc.RpcError | None = None
    try:
        alone.push(request)
    except grpc.RpcError as error:
        refused = error
    if refused is not None:
        assert refused.code() in REFUSALS, refused.details()
        return
    event = alone.event()
    while event.WhichOneof("outcome") == "text" and kind == "step" and event.number + 1 < request.step.remaining:
        event = alone.event()
    assert event.WhichOneof("outcome") == "text" or event.fault.code != grpc.StatusCode.INTERNAL.value[0]
    alone.stub.Release(stage_pb2.ReleaseRequest(sessions=[request.session]))


@pytest.mark.parametrize("raw", [b"\xff" * 40, b"\x0a\x05ab", bytes(100)], ids=["ones", "cut", "zeros"])
def test_bytes_that_are_no_message(alone: Peer, raw: bytes) -> None:
    call = alone.channel.unary_unary(f"/{SERVICE}/Push")
    with pytest.raises(grpc.RpcError) as caught:
        call(raw, timeout=5)
    assert caught.value.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), "gRPC's own answer"
    assert alone.serving(SERVICE)


def test_and_a_good_request_is_still_served_right(alone: Peer, digest: str, name: str) -> None:
    texts = []
    for i in range(2):
        alone.push(sweep(digest, f"{name}{i}"))
        event = alone.event()
        texts.append(event.text)
    alone.stub.Release(stage_pb2.ReleaseRequest(sessions=[f"{name}0", f"{name}1"]))
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
