"""Every field of a hop is checked before anything is made of it."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from stages.checkpoint.manifest import Manifest
from stages.host.plan import HostPlan, ModelSource, plan_host
from stages.host.validation import MAX_NUMBER, parse_hop
from stages.limits import MAX_CANDIDATES
from stages.model.architecture import LlamaArchitecture
from stages.model.codec import HIDDEN
from stages.model.scoring import MAX_SCORED_ROWS
from stages.v1 import stage_pb2
from stages.wire.hop_stream import BATCH_BYTES
from stages.wire.messages import MAX_TIMINGS, put_work, work_of
from stages.wire.status import StatusError
from tests.conftest import refused
from tests.stages.hops import step

WIDTH, CODE_DIM = 32, 32
NAN, INF = float("nan"), float("inf")

Hop = stage_pb2.Hop
Change = Callable[[Hop], object]


@pytest.fixture(scope="module")
def plans(bundles: Path) -> dict[str, HostPlan]:
    """A first host and a middle one."""
    return {"first": plan_host(bundles / "own", (0,)), "middle": plan_host(bundles / "own", (1,))}


def hop(plan: HostPlan, kind: str) -> Hop:
    """kind: of the model, or `score` or `verify` for such a step of the AR model."""
    source = plan.models.get("ar" if kind in ("score", "verify") else kind)
    request = Hop(router="r", session="s", capacity=40, digest=source.digest)
    request.left_s = 60
    clean, first = b"0123456789", plan.is_first
    if kind == "chain":
        request.sweep.CopyFrom(stage_pb2.Sweep(clean=clean, slots=20, steps=2, codec="int8", block=plan.blocks[0]))
        request.sweep.sampling.temperature = 0.8
        if not first:
            request.sweep.estimate = bytes(20 * (CODE_DIM + 4))
    else:
        fields: dict[str, Any] = {
            "score": {"candidates": [b"abcde", b"fghij", b"klmno"]},
            "verify": {"draft": 3},
        }.get(kind, {"remaining": 20})
        rows = 10 + 3 * 4 * (kind == "score")
        hidden = b"" if first else bytes(rows * WIDTH * 4)
        number = MAX_NUMBER  # which leaves room for those that follow
        put_work(request, step(number=number, clean=clean, stage=plan.blocks[0], codec="fp32", hidden=hidden, **fields))
    return request


@pytest.mark.parametrize("where", ["first", "middle"])
@pytest.mark.parametrize("kind", ["chain", "ar", "score", "verify"])
def test_a_valid_hop_is_accepted(plans: dict[str, HostPlan], where: str, kind: str) -> None:
    assert parse_hop(hop(plans[where], kind), plans[where]).kind == ("chain" if kind == "chain" else "ar")


@pytest.mark.parametrize("where", ["first", "middle"])
def test_a_sweep_may_fill_the_context_to_its_last_position(plans: dict[str, HostPlan], where: str) -> None:
    request = hop(plans[where], "chain")
    request.sweep.slots = 502
    request.capacity = 512
    if where == "middle":
        request.sweep.estimate = bytes(502 * (CODE_DIM + 4))
    parse_hop(request, plans[where])


def test_a_step_goes_to_the_model_with_its_digest(bundles: Path) -> None:
    plan = plan_host(bundles / "scored", (0,))
    for kind in ("ar", "scorer"):
        assert parse_hop(hop(plan, kind), plan).kind == kind
    without = plan_host(bundles / "own", (0,))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, r"this host has [0-9a-f]{12} \(ar\): give every host"):
        parse_hop(hop(plan, "scorer"), without)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "this host has no chain model"):
        parse_hop(hop(plan, "chain"), plan_host(bundles / "own" / "ar", (0,)))


def test_the_largest_step_fits_a_message(plans: dict[str, HostPlan]) -> None:
    plan, request = plans["middle"], hop(plans["middle"], "score")
    candidates = [b"x" * 16] * (MAX_SCORED_ROWS // 16)
    clean = b"x" * 496
    hidden = bytes((496 + len(candidates) * 15) * WIDTH * 4)
    put_work(request, step(clean=clean, candidates=candidates, hidden=hidden, stage=1, codec="fp32"))
    request.capacity = 496
    assert parse_hop(request, plan).kind == "ar"
    assert request.ByteSize() + BATCH_BYTES < plan.message_bytes()


def test_a_wide_model_scores_fewer_tokens(tmp_path: Path) -> None:
    """Their hidden states are in a host's memory and in messages."""
    wide = LlamaArchitecture((1, 1), 1 << 15, 256, 8, 128, 4, 4096, 128_000, 1e-5, 1e4)
    source = ModelSource(tmp_path, Manifest("ar", wide, (None, None), probe_tokens=(1,)), "d")
    plan = HostPlan((0,), 2, {"ar": source})
    request = Hop(router="r", session="s", capacity=40, digest="d", left_s=60)
    token = source.vocabulary.encode([7])
    put_work(request, step(clean=token, remaining=1, codec="int8", candidates=[token * 16] * 32))
    assert parse_hop(request, plan).kind == "ar"
    request.read.score.candidates.append(token * 16)
    with pytest.raises(StatusError, match="33 candidates of 16 tokens; a hop can have at most 512 in all at width"):
        parse_hop(request, plan)


def test_a_replay_is_accepted_only_at_the_start_of_a_session(plans: dict[str, HostPlan]) -> None:
    for kind in ("chain", "score"):
        request = hop(plans["first"], kind)
        work_of(request).reads.extend([4, 3])
        parse_hop(request, plans["first"])
    request = hop(plans["first"], "chain")
    request.sweep.MergeFrom(stage_pb2.Sweep(reads=[4, 3], start=1))
    with pytest.raises(StatusError, match="only a sweep that opens a session can be a replay"):
        parse_hop(request, plans["first"])


def shaped(**fields: Any) -> Change:
    return lambda p: p.read.sample.sampling.shaping.MergeFrom(stage_pb2.Shaping(**fields))


def follows(**fields: Any) -> Change:
    return lambda p: p.read.sample.sampling.grammar.MergeFrom(stage_pb2.Grammar(json_schema="{}", **fields))


def scored(*candidates: bytes) -> Change:
    return lambda p: p.read.score.CopyFrom(stage_pb2.Score(candidates=candidates))


def drawn(clean: bytes = b"0123456789", start: int = 0, prompt: int = 10, **fields: Any) -> Change:
    """A step whose candidates the last host writes."""
    drafting = stage_pb2.Drafting(most=fields.pop("most", 4), branches=fields.pop("branches", 3))
    score = stage_pb2.Score(drafting=drafting, **{"temperature": 0.8, "remaining": 20, **fields})
    read = stage_pb2.Read(clean=clean, start=start, prompt=prompt, codec="fp32", score=score)
    return lambda p: p.read.CopyFrom(read)


def refusal(plan: HostPlan, kind: str, change: Change) -> StatusError:
    request = hop(plan, kind)
    change(request)
    with pytest.raises(StatusError) as caught:
        parse_hop(request, plan)
    return caught.value


ANYWHERE: list[tuple[Change, str]] = [
    (lambda p: p.ClearField("router"), "router must be 1 to 64 printable"),
    (lambda p: setattr(p, "router", "x" * 65), "router must be 1 to 64 printable"),
    (lambda p: setattr(p, "session", "a\nb"), "session must be 1 to 64 printable"),
    (lambda p: p.ClearField("work"), "carries no work"),
    (lambda p: setattr(work_of(p), "number", (1 << 64) - 1), "the limit is"),
    (lambda p: p.timings.extend([stage_pb2.HopTiming(host="h")] * (MAX_TIMINGS + 1)), "65 timings"),
    (lambda p: p.timings.add(), "a timing's host must be"),
    (lambda p: p.timings.add(host="h", queue_ms=-1), "negative, not finite"),
    (lambda p: p.timings.add(host="h", compute_ms=1e300), "or years long"),
    (lambda p: p.timings.add(host="h", received_bytes=(1 << 64) - 1), "a message of 18446744073709551615 bytes"),
    (lambda p: p.path.extend(["h:1"] * (MAX_TIMINGS + 1)), "the path has 65 hosts"),
    (lambda p: p.path.append(""), "an address on the path must be 1 to 255 printable"),
    (lambda p: p.path.append("x" * 257), "an address on the path must be"),
    (lambda p: setattr(p, "place", 1), "place 1 is not on a path of 0 hosts"),
    (lambda p: (p.path.extend(["a:1", "b:1"]), setattr(p, "place", 2)), "place 2 is not on a path of 2 hosts"),
    (lambda p: setattr(p, "request", "x\n"), "request must be 1 to 64 printable"),
    (lambda p: setattr(p, "capacity", 513), "a session of 513 positions does not fit the context of 512"),
    (lambda p: setattr(p, "capacity", 9), "10 tokens at position 0 do not fit the session's 9"),
]
SWEEP: list[tuple[Change, str]] = [
    (lambda p: work_of(p).reads.extend([4, 7]), "2 reads do not fit 10 clean tokens: too many, too long, or empty"),
    (lambda p: work_of(p).reads.extend([1] * 11), "11 reads do not fit 10 clean tokens: too many, too long, or empty"),
    (lambda p: setattr(p.sweep, "clean", b""), "at least one known token"),
    (lambda p: setattr(p.sweep, "slots", 0), "0 slots after 10 tokens do not fit"),
    (lambda p: setattr(p.sweep, "slots", 503), "503 slots after 10 tokens do not fit the context of 512"),
    (lambda p: setattr(p.sweep, "start", 4_000_000_000), "do not fit"),
    (lambda p: setattr(p.sweep, "steps", 0), "steps must be 1 to 64, not 0"),
    (lambda p: setattr(p.sweep.sampling, "temperature", NAN), "temperature must be 0 to 100, not nan"),
    (lambda p: setattr(p.sweep.sampling, "temperature", -0.1), "temperature must be 0 to 100, not -0.1"),
    (lambda p: setattr(p.sweep.sampling.shaping, "min_p", 0.1), "a sweep takes only seed and temperature"),
    (lambda p: setattr(p.sweep, "codec", "zip"), "unknown state codec 'zip'"),
    (lambda p: setattr(p.sweep, "sampler", "sde"), "unknown sampler 'sde'; choose from stochastic, ode"),
]
LATER_SWEEP: list[tuple[Change, str]] = [
    (lambda p: setattr(p.sweep, "estimate", b""), "int8 payload has 0 bytes; 20 x 32 numbers take 720"),
    (lambda p: setattr(p.sweep, "estimate", struct.pack("<20f", *[NAN] * 20) + bytes(640)), "not finite"),
    (lambda p: setattr(p.sweep, "estimate", struct.pack("<20f", *[1.0] * 20) + bytes(640)), "beyond 2"),
    (lambda p: setattr(p.sweep, "estimate", bytes(80) + b"\x80" * 640), "integers beyond 127"),
]
STEP: list[tuple[Change, str]] = [
    (lambda p: setattr(work_of(p), "clean", b""), "at least one new token"),
    (lambda p: setattr(p.read.sample, "draft", 1), "must end after draft tokens of the router"),
    (lambda p: p.read.reads.append(1), "a step that samples takes no reads"),
    (lambda p: setattr(p.read.sample, "remaining", 503), "503 tokens to generate do not fit the context of 512"),
    (lambda p: setattr(work_of(p), "start", 4_000_000_000), "do not fit"),
    (lambda p: setattr(p.read.sample.sampling, "temperature", INF), "temperature must be 0 to 100"),
    (shaped(top_k=257), "top_k must be 0 to 256, not 257"),
    (shaped(top_p=0), "top_p must be above 0, not 0.0"),
    (shaped(min_p=INF), "min_p must be from 0 to 1, not inf"),
    (shaped(frequency_penalty=NAN), "frequency_penalty must be from -2 to 2"),
    (shaped(presence_penalty=2.5), "presence_penalty must be from -2 to 2"),
    (shaped(logit_bias={256: 1.0}), "logit_bias names token 256"),
    (shaped(logit_bias={1: NAN}), "logit_bias must be -100 to 100, not nan"),
    (shaped(logit_bias=dict.fromkeys([*range(256), 300], 1.0)), "logit_bias names token 300"),
    (shaped(prompt=11), "the prompt has 11 tokens, but only 10 are known"),
    (lambda p: setattr(p.read.sample.sampling, "logprobs", 21), "logprobs must be 0 to 20, not 21"),
    (lambda p: p.read.sample.sampling.grammar.SetInParent(), "a JSON schema must have 1 to 16384 bytes"),
    (follows(ends=[256]), "ends must be at most 64 tokens of the model"),
    (follows(prompt=11), "the prompt has 11 tokens, but only 10 are known"),
    (lambda p: work_of(p).ClearField("codec"), "unknown codec of hidden states ''"),
    (lambda p: setattr(work_of(p), "codec", "int4"), "unknown codec of hidden states 'int4'; choose from fp32, int8"),
]
SCORE: list[tuple[Change, str]] = [
    (lambda p: setattr(work_of(p), "clean", b""), "at least one new token"),
    (scored(), "a step can score 1 to 1024 candidates, not 0"),
    (lambda p: p.read.score.candidates.append(b"abc"), "candidates must have the same length"),
    (scored(*[b"abcde"] * (MAX_CANDIDATES + 1)), "a step can score 1 to 1024 candidates, not 1025"),
    (lambda p: setattr(p.read.score, "batches", MAX_CANDIDATES + 1), "1025 batches of candidates"),
    (lambda p: p.read.score.MergeFrom(stage_pb2.Score(batch=2, batches=2)), "the step has 2 batches"),
    (lambda p: p.read.score.MergeFrom(stage_pb2.Score(batch=1, batches=2)), "must bring no new tokens"),
    (lambda p: (scored(b"b")(p), setattr(p.read.score, "batches", 2)), "candidates of one token must come in one"),
    (scored(*[b"x" * 400] * 11), "11 candidates of 400 tokens; a hop can have"),
    (scored(b"x" * 503), "of 503 tokens after 10 do not fit the context"),
    (lambda p: setattr(p.read.score, "temperature", NAN), "temperature must be 0 to 100"),
]
DRAWN: list[tuple[Change, str]] = [
    (drawn(branches=0), "candidates must be 1 to 1024 here, not 0"),
    (drawn(most=1), "3 candidates of 1 tokens: each needs at least 2"),
    (drawn(most=1366), "3 candidates of 1366 tokens: each needs at least 2, and a hop can have at most 4096 in all"),
    (drawn(prompt=0), "the prompt must have 1 to 10 tokens, not 0"),
    (drawn(remaining=503), "503 tokens to generate after 10 do not fit the context of 512"),
    (drawn(batches=2), "come in one batch"),
    (drawn(candidates=[b"abcd"] * 3, remaining=3), "candidates must have shape (3, 3), not (3, 4)"),
    (drawn(clean=b"", start=10), "at least one new token, or candidates of two"),
    (drawn(clean=b"", start=10, candidates=[b"a"] * 3, remaining=1), "at least one new token, or candidates of two"),
    (drawn(temperature=0.0), "a temperature above 0"),
]
VERIFY: list[tuple[Change, str]] = [
    (lambda p: setattr(p.read.sample, "draft", 10), "10 draft tokens among 10 new tokens: send at least one"),
]
LATER_STEP: list[tuple[Change, str]] = [
    (lambda p: setattr(work_of(p), "codec", "int8"), "int8 payload has 1280 bytes; 10 x 32 numbers take 600"),
    (lambda p: setattr(work_of(p), "hidden", b"x"), "fp32 payload has 1 bytes; 10 x 32 numbers take 1280"),
    (lambda p: setattr(work_of(p), "hidden", struct.pack("<320f", *[NAN] * 320)), "not finite"),
]
LATER_SCORE: list[tuple[Change, str]] = [
    (lambda p: setattr(work_of(p), "hidden", bytes(10 * WIDTH * 4)), "1280 bytes; 22 x 32 numbers take 2816"),
    (lambda p: setattr(work_of(p), "hidden", struct.pack("<704f", *[INF] * 704)), "not finite"),
]
CASES = [
    *((where, kind, *case) for where in ("first", "middle") for kind in ("chain", "ar") for case in ANYWHERE),
    *((where, "chain", *case) for where in ("first", "middle") for case in SWEEP),
    *((where, "ar", *case) for where in ("first", "middle") for case in STEP),
    *((where, "score", *case) for where in ("first", "middle") for case in SCORE),
    *((where, "verify", *case) for where in ("first", "middle") for case in VERIFY),
    *(("first", "score", *case) for case in DRAWN),
    *(("middle", "score", *case) for case in LATER_SCORE),
    *(("middle", "chain", *case) for case in LATER_SWEEP),
    *(("middle", "ar", *case) for case in LATER_STEP),
    ("first", "chain", lambda p: setattr(p.sweep, "estimate", b"x"), "must carry no estimate"),
    ("first", "ar", lambda p: setattr(work_of(p), "hidden", b"x"), "must carry no hidden states"),
]


@pytest.mark.parametrize(("where", "kind", "change", "says"), CASES)
def test_a_wrong_field_is_named(plans: dict[str, HostPlan], where: str, kind: str, change: Change, says: str) -> None:
    refused = refusal(plans[where], kind, change)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in refused.message


@pytest.mark.parametrize("kind", ["chain", "ar"])
def test_other_weights_and_other_blocks_are_refused(plans: dict[str, HostPlan], kind: str) -> None:
    plan = plans["middle"]
    other = refusal(plan, kind, lambda p: setattr(p, "digest", "abcdef" * 10))
    assert other.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "abcdefabcdef, but this host has" in other.message
    assert "(none)" in refusal(plan, kind, lambda p: p.ClearField("digest")).message
    for part in (0, 2, 99):
        field = "block" if kind == "chain" else "stage"
        refused = refusal(plan, kind, lambda p, n=part, field=field: setattr(work_of(p), field, n))
        assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"{part} does not start here: this host holds 1" in refused.message


def test_an_expired_hop_is_refused(plans: dict[str, HostPlan]) -> None:
    late = refusal(plans["first"], "chain", lambda p: setattr(p, "left_s", 0))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("codec", HIDDEN)
@pytest.mark.parametrize("draft", [0, 1, 9])
def test_draft_tokens_and_every_hidden_codec_are_accepted(plans: dict[str, HostPlan], codec: str, draft: int) -> None:
    request = hop(plans["middle"], "ar")
    hidden = HIDDEN[codec].encode(torch.full((10, WIDTH), 0.5))
    put_work(request, step(clean=b"0123456789", stage=1, codec=codec, draft=draft, hidden=hidden))
    assert parse_hop(request, plans["middle"]).kind == "ar"
