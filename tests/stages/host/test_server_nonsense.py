"""Anything at all, sent to a stage server: it is refused for a reason, or computed."""

import secrets
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onesweep.stages.host.server import SERVICE
from onesweep.stages.host.service import MOST_HOPS
from onesweep.stages.model.samplers import SAMPLERS
from onesweep.stages.v1 import stage_pb2
from tests.stages import hops
from tests.stages.pictures.lines import Line, open_line
from tests.stages.pictures.tiny import tiny_picture_bundle
from tests.stages.raw_client import Peer, Rejected, sweep
from tests.stages.slow_runner import alone as engine_alone

WORKS = [field for field in stage_pb2.Hop.DESCRIPTOR.fields if field.containing_oneof]
large = st.integers(0, 2**64 - 1)
payload = st.binary(max_size=64) | st.integers(0, 700).map(bytes)
VALUES = {  # by the type of a field
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: large,
    FieldDescriptor.TYPE_UINT32: st.integers(0, 60) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(0, 2) | st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.floats(0, 2, width=32) | st.floats(width=32),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=70),
    FieldDescriptor.TYPE_BYTES: payload,
}
SENSIBLE = {  # by its name: what gets past the first check now and then
    "codec": st.sampled_from(["fp32", "int8", "int4"]),
    "sampler": st.sampled_from([*SAMPLERS, ""]),
    "path": st.sampled_from(["127.0.0.1:1", "there:2"]),
    "traceparent": st.sampled_from([f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'0' * 32}-{'b' * 16}-01"]),
    "draft": st.integers(0, 9),
    "depths": st.integers(0, 4),
    "reads": st.integers(0, 9),
    "candidates": st.binary(max_size=3),
    "solver": st.sampled_from(["euler", "2m"]),
    "classes": st.integers(0, 3),
    "levels": st.integers(1, 9),
    "guidance": st.floats(0, 20),
}


def values_of(field: FieldDescriptor) -> Any:
    if field.message_type and field.message_type.GetOptions().map_entry:
        return st.dictionaries(*(values_of(part) for part in field.message_type.fields), max_size=4)
    one = fields_of(field.message_type) if field.message_type else VALUES[field.type]
    one = SENSIBLE[field.name] | one if field.name in SENSIBLE else one
    return st.lists(one, max_size=4) if field.is_repeated else one


def fields_of(message: Descriptor, always: Any = None) -> Any:
    """Any of a message's fields with any values, as they are written in Python; and those of `always`."""
    fields = {field.name: values_of(field) for field in message.fields if field not in WORKS}
    optional = st.fixed_dictionaries({}, optional=fields)
    return optional if always is None else st.tuples(optional, always).map(lambda both: {**both[0], **both[1]})


envelopes = fields_of(stage_pb2.Hop.DESCRIPTOR)
good_drafts = st.integers(1, 6).map(lambda count: {"draft": count})
good_candidates = st.tuples(st.integers(1, 300), st.integers(1, 40)).map(
    lambda size: {"candidates": [bytes(size[1])] * size[0]}
)
works = st.one_of(
    *(st.tuples(st.just(field.name), fields_of(field.message_type)) for field in WORKS),
    st.tuples(st.just("verify"), fields_of(stage_pb2.Verify.DESCRIPTOR, good_drafts)),
    st.tuples(st.just("score"), fields_of(stage_pb2.Score.DESCRIPTOR, good_candidates)),
)


REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}

OUTCOMES = {"text", "scores"}
PICTURES = ("draw", "denoise", "consult")
GOOD = {"prefill": {}, "decode": {"remaining": 3}, "verify": {}, "score": {"candidates": [b"x"]}}


def nonsense(alone: Peer, digest: str, envelope: dict[str, Any], work: tuple[str, dict[str, Any]]) -> stage_pb2.Hop:
    """A good hop with any of its fields exchanged."""
    kind, fields = work
    request = sweep(digest, secrets.token_hex(8))
    if kind == "sweep":
        request.sweep.MergeFrom(stage_pb2.Sweep(**fields))
    else:
        request.digest = alone.describe().releases[-1].ar.digest
        request.ClearField("sweep")
        clean = {} if kind in PICTURES else {"clean": b"The sea "}
        work = {"codec": "fp32", **clean, **GOOD.get(kind, {}), **fields}
        request.MergeFrom(stage_pb2.Hop(**{kind: work}))
    request.MergeFrom(stage_pb2.Hop(**envelope))
    return request


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(envelope=envelopes, work=works)
def test_no_message_harms_a_host(alone: Peer, digest: str, envelope, work) -> None:
    """It is refused for a reason, or computed."""
    request = nonsense(alone, digest, envelope, work)
    rejections = alone.send(request).rejections
    if rejections:
        assert Rejected(rejections[0]).code() in REFUSALS, rejections[0].message
        return
    if request.HasField("prefill"):  # it has no outcome
        alone.release(request.session)
        return
    event = alone.event_of(request.session)
    while event.WhichOneof("outcome") == "text" and event.number + 1 < request.decode.remaining:
        event = alone.event_of(request.session)
    assert event.WhichOneof("outcome") in OUTCOMES or event.fault.code != grpc.StatusCode.INTERNAL.value[0]
    alone.release(request.session)


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory, module_servers: Any) -> Iterator[Line]:
    bundle = tiny_picture_bundle(tmp_path_factory.mktemp("drawing"), ("chain", "steps"))
    with open_line(module_servers, bundle, (0, 1, 2)) as line:
        yield line


drawings = st.fixed_dictionaries({}, optional={"drawing": fields_of(stage_pb2.Drawing.DESCRIPTOR)})


@settings(max_examples=100, deadline=None)
@given(
    envelope=envelopes,
    work=st.one_of(
        st.tuples(st.just("chain"), fields_of(stage_pb2.Draw.DESCRIPTOR, drawings)),
        st.tuples(st.just("steps"), fields_of(stage_pb2.Denoise.DESCRIPTOR, drawings)),
    ),
)
def test_no_message_harms_a_host_that_draws(drawing: Line, envelope, work) -> None:
    kind, fields = work
    hop, host = drawing.hop(kind, secrets.token_hex(8)), drawing.peers[0]
    hop.ClearField("path")
    hop.MergeFrom(stage_pb2.Hop(**envelope, **{"draw" if kind == "chain" else "denoise": fields}))
    rejections = host.send(hop).rejections
    if rejections:
        assert Rejected(rejections[0]).code() in REFUSALS, rejections[0].message
    else:
        event = host.event_of(hop.session)
        assert event.HasField("pictures") or event.fault.code != grpc.StatusCode.INTERNAL.value[0]
    drawing.release(hop.session)
    assert not host.describe().counters.session_bytes


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 40, b"\x0a\x05ab", bytes(100), b"\x12\x00" * (MOST_HOPS + 1)],
    ids=["ones", "cut", "zeros", "more empty hops than travel together"],
)
def test_bytes_that_are_no_message(alone: Peer, digest: str, name: str, raw: bytes) -> None:
    """Those who sent them are told; another stream, and the host, live on."""
    alone.push(sweep(digest, name))
    alone.event_of(name)
    answers = alone.channel.stream_stream(f"/{SERVICE}/Push")(iter([raw]), timeout=10)
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert alone.serving(SERVICE)
    assert alone.refusal(sweep(digest, name)).code() is grpc.StatusCode.ALREADY_EXISTS, "over the stream of before"
    alone.release(name)


def test_and_a_good_request_is_still_served_right(alone: Peer, digest: str, name: str, loaded) -> None:
    alone.push(sweep(digest, name))
    expected = engine_alone(loaded["own"], hops.sweeps(b"The sea ", temperature=0.0))
    assert (alone.event_of(name).text, len(expected)) == (expected, 16)
    alone.release(name)
