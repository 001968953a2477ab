"""Anything at all, sent to a stage server: it is refused for a reason, or computed."""

from __future__ import annotations

import secrets
import struct
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.host.server import SERVICE
from stages.model.samplers import SAMPLERS
from stages.v1 import stage_pb2
from tests.stages.raw_client import Peer, Rejected, sweep

anything = st.one_of(st.integers(0, 60), st.integers(0, 2**32 - 1))
large = st.integers(0, 2**64 - 1)
reads = st.lists(st.one_of(st.integers(0, 9), anything), max_size=4)
payload = st.one_of(st.binary(max_size=64), st.integers(0, 700).map(bytes))
sampling = st.builds(stage_pb2.Sampling, seed=large, temperature=st.one_of(st.floats(0, 2), st.floats()))
timings = st.lists(st.builds(stage_pb2.HopTiming, host=st.text(max_size=3), queue_ms=st.floats()), max_size=2)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "router": st.text(max_size=70),
        "session": st.text(max_size=70),
        "capacity": anything,
        "digest": st.text(max_size=64),
        "deadline_unix_ms": st.integers(-(2**63), 2**63 - 1),
        "timings": timings,
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
        "start": anything,
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
of_a_stage = {
    "number": large,
    "stage": anything,
    "start": anything,
    "clean": payload,
    "hidden": payload,
    "codec": st.one_of(st.sampled_from(["fp32", "int8"]), st.text(max_size=8)),
    "reads": reads,
}
odds = payload | st.lists(st.floats(width=32), max_size=9).map(lambda odds: struct.pack(f"<{len(odds)}f", *odds))
rejections = st.builds(stage_pb2.RejectionSampling, odds=odds, draw_set=st.one_of(st.integers(0, 4), anything))
trees = st.builds(stage_pb2.DraftTree, depths=st.lists(st.one_of(st.integers(0, 4), anything), max_size=9))
candidates = st.lists(st.binary(max_size=3), max_size=4) | st.tuples(st.integers(1, 300), st.integers(1, 40)).map(
    lambda size: [bytes(size[1])] * size[0]
)
good_drafts = st.integers(1, 6).map(
    lambda count: {
        "draft": count,
        "rejection": stage_pb2.RejectionSampling(odds=struct.pack("<f", 0.5) * count, draw_set=1 + count % 3),
    }
)
good_candidates = st.tuples(st.integers(1, 40), st.integers(1, 30)).map(
    lambda size: {"candidates": [bytes(size[1])] * size[0]}
)


def fields_of(always: Any = None, **kinds: Any) -> Any:
    """Fields of a kind of work for a stage, each of them maybe; and those of `always`."""
    optional = st.fixed_dictionaries({}, optional={**of_a_stage, **kinds})
    return optional if always is None else st.tuples(optional, always).map(lambda both: {**both[0], **both[1]})


REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}

drafts = {"draft": st.one_of(st.integers(0, 9), anything), "sampling": sampling}
works = st.one_of(
    sweeps.map(lambda w: ("sweep", w)),
    fields_of(for_score=st.booleans()).map(lambda w: ("prefill", w)),
    fields_of(remaining=st.integers(0, 60), sampling=sampling).map(lambda w: ("decode", w)),
    st.one_of(
        fields_of(**drafts, rejection=rejections), fields_of(**drafts, tree=trees), fields_of(good_drafts, **drafts)
    ).map(lambda w: ("verify", w)),
    st.one_of(fields_of(candidates=candidates, sampling=sampling), fields_of(good_candidates, sampling=sampling)).map(
        lambda w: ("score", w)
    ),
)
OUTCOMES = {"text", "scores", "verification"}
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
        work = {"clean": b"The sea ", "codec": "fp32", **GOOD[kind], **fields}
        request.MergeFrom(stage_pb2.Hop(**{kind: work}))
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
    if request.HasField("prefill"):  # it has no outcome
        alone.release(request.session)
        return
    event = alone.event_of(request.session)
    while event.WhichOneof("outcome") == "text" and event.number + 1 < request.decode.remaining:
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
    assert response.event.WhichOneof("outcome") in ({None} if request.HasField("prefill") else OUTCOMES)
    alone.release(request.session)


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
