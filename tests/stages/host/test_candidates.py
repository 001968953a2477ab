"""Scores and verdicts along hosts equal those of the whole model for the same bytes, without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stages.checkpoint.checkpoint import load_ar
from stages.host.parts import Parts, load_parts
from stages.host.plan import plan_host
from stages.host.scheduler import HopWork
from stages.host.sessions import SessionStore
from stages.host.validation import parse_hop
from stages.model import scoring
from stages.model.codec import HIDDEN
from stages.model.pipeline import ArModel
from stages.v1 import stage_pb2
from stages.wire.messages import copy_of, put_work, work_of
from stages.wire.status import StatusError
from tests.stages.hops import step

SPLITS: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)), ((0,), (1,), (2,)))
CONTEXT = 512
TOLERANCE = 1e-4
KNOWN = b"It was late when the train came in, and nobody had waited for it but the dog. "


@pytest.fixture(scope="module")
def hosts(bundles: Path) -> dict[tuple[int, ...], Parts]:
    spans = {span for split in SPLITS for span in split}
    return {span: load_parts(plan_host(bundles / "scored", span)) for span in spans}


@pytest.fixture(scope="module")
def models(bundles: Path) -> dict[str, ArModel]:
    return {kind: load_ar(bundles / "scored" / kind) for kind in ("ar", "scorer")}


@dataclass
class Line:
    """One request's session on hosts that hand its hops on to each other, every field checked on the way."""

    hosts: Sequence[Parts]
    kind: str = "scorer"
    capacity: int = CONTEXT
    temperature: float = 0.8
    seed: int = 5
    more: stage_pb2.Sampling = field(default_factory=stage_pb2.Sampling)
    """Sampling settings beside seed and temperature."""
    stores: list[SessionStore] = field(default_factory=list)
    number: int = 0
    prompt: int = 0
    """Tokens of its steps that attend at once."""
    payloads: list[int] = field(default_factory=list)
    """Bytes of hidden states of every hop."""

    def __post_init__(self) -> None:
        self.stores = [SessionStore(1 << 30, 60.0) for _ in self.hosts]

    def step(self, clean: bytes, start: int = 0, **fields: Any) -> stage_pb2.Event:
        source = self.hosts[0].plan.models[self.kind]
        hop = stage_pb2.Hop(router="r", session="s", capacity=self.capacity, digest=source.digest)
        hop.left_s = 600
        sampling = stage_pb2.Sampling(seed=self.seed, temperature=self.temperature)
        sampling.MergeFrom(self.more)
        fields = {"remaining": 1, "codec": "fp32", **fields}
        if not fields.get("candidates"):
            fields = {"prompt": self.prompt, **fields}
        put_work(hop, step(number=self.number, start=start, clean=clean, sampling=sampling, **fields))
        self.number += 1
        return self.along(hop)

    def along(self, hop: stage_pb2.Hop) -> stage_pb2.Event:
        outcome: stage_pb2.Hop | stage_pb2.Event = copy_of(hop)
        for parts, store in zip(self.hosts, self.stores, strict=True):
            assert isinstance(outcome, stage_pb2.Hop)
            work = parse_hop(outcome, parts.plan)
            session = store.sessions.get("s")
            if session is None:
                session = store.open("s", "r", work.kind, hop.capacity, parts, 0.0)
            work.begin(session, parts.plan.blocks[-1] + 1)
            while work.outcome is None:
                call = work.next_op()
                work.complete(call.compute([call.piece])[0])
            outcome = work.result or work.outcome
            if isinstance(outcome, stage_pb2.Hop):
                self.payloads.append(len(work_of(outcome).hidden))
        assert isinstance(outcome, stage_pb2.Event)
        return outcome

    def scores(self, clean: bytes, candidates: Sequence[bytes], start: int = 0, **fields: Any) -> NDArray[np.float64]:
        event = self.step(clean, start, candidates=candidates, **fields)
        nats = np.frombuffer(event.scores.nats, "<f8")
        assert nats.shape == (len(candidates),)
        return nats


@torch.inference_mode()
def expected(model: ArModel, known: bytes, candidates: Sequence[bytes], temperature: float) -> NDArray[np.float64]:
    """The same from one pass over each whole text."""
    texts = torch.tensor([list(known + candidate) for candidate in candidates])
    nats = (model(texts).double() / temperature).log_softmax(-1)[:, len(known) - 1 : -1]
    return nats.gather(2, texts[:, len(known) :, None])[:, :, 0].sum(1).numpy()


def near(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
    """In nats: a logit is known to about TOLERANCE, and a low temperature magnifies it."""
    return bool(np.abs(found - wanted).max() < TOLERANCE * max(1.0, np.abs(wanted).max()))


def candidates_of(count: int, length: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(length) for _ in range(count)]


# Scores
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    known=st.binary(min_size=1, max_size=40)
    | st.sampled_from([127, 128, 129, 300]).map(lambda n: bytes(range(n % 256))),
    count=st.integers(1, 24),
    length=st.integers(1, 40),
    temperature=st.sampled_from([0.5, 0.8, 1.0, 4.0]),
    split=st.sampled_from(SPLITS),
    kind=st.sampled_from(["ar", "scorer"]),
    seed=st.integers(0, 3),
)
def test_scores_are_those_of_the_model(
    hosts: dict[tuple[int, ...], Parts],
    models: dict[str, ArModel],
    known: bytes,
    count: int,
    length: int,
    temperature: float,
    split: Any,
    kind: str,
    seed: int,
) -> None:
    known = known or b"x"
    line = Line([hosts[span] for span in split], kind, temperature=temperature)
    candidates = candidates_of(count, length, seed)
    assert near(line.scores(known, candidates), expected(models[kind], known, candidates, temperature))


@pytest.mark.parametrize(("count", "length"), [(1, 1), (7, 1), (1, 300), (32, 32), (128, 32), (256, 16)])
def test_the_split_among_hosts_does_not_change_scores(hosts, models, count: int, length: int) -> None:
    candidates = candidates_of(count, length)
    lines = [Line([hosts[span] for span in split]) for split in SPLITS]
    found = [line.scores(KNOWN, candidates) for line in lines]
    assert all(np.array_equal(each, found[0]) for each in found)
    assert near(found[0], expected(models["scorer"], KNOWN, candidates, 0.8))
    assert lines[-1].payloads == [4 * 32 * (len(KNOWN) + count * (length - 1))] * 2


def test_int8_hidden_states_change_scores_a_little(hosts: dict[tuple[int, ...], Parts]) -> None:
    candidates = candidates_of(16, 16)
    exact = Line([hosts[0, 1, 2]]).scores(KNOWN, candidates)
    line = Line([hosts[span] for span in SPLITS[-1]])
    rounded = line.scores(KNOWN, candidates, codec="int8")
    assert 0 < np.abs(rounded - exact).mean() < 0.4
    assert line.payloads == [HIDDEN["int8"].size(len(KNOWN) + 16 * 15, 32)] * 2


def test_at_temperature_zero_one_byte_has_probability_one(hosts, models) -> None:
    first = models["scorer"](torch.tensor([list(KNOWN)]))[0, -1].argmax()
    best = bytes([int(first), 7])
    scores = Line([hosts[0, 1, 2]], temperature=0.0).scores(KNOWN, [best, bytes([best[0] ^ 1, 7])])
    assert scores[1] <= scoring.IMPOSSIBLE_NATS < scores[0] / 2
    assert np.isfinite(scores).all()


def test_candidates_leave_no_trace_in_the_session(hosts: dict[tuple[int, ...], Parts]) -> None:
    """The text and the caches after them are those without them, to the last bit."""
    line, other = (Line([hosts[0, 1, 2]], prompt=len(KNOWN)) for _ in range(2))
    line.scores(KNOWN, candidates_of(16, 16))
    other.step(KNOWN)
    sessions = [each.stores[0].sessions["s"] for each in (line, other)]
    for part in range(3):
        for ours, theirs in zip(*(session.caches[part] for session in sessions), strict=True):
            assert ours.length == theirs.length == len(KNOWN)
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
    assert [line.step(b"The", len(KNOWN)).text for line in (line, other)].count(b"") == 0


# Candidates that the last host writes


def drawing(parts: Parts) -> stage_pb2.Hop:
    score = stage_pb2.Score(temperature=0.8, seed=5, remaining=8, drafting=stage_pb2.Drafting(most=4, branches=3))
    read, digest = (
        stage_pb2.Read(prompt=len(KNOWN), clean=KNOWN, codec="fp32", score=score),
        parts.plan.models["ar"].digest,
    )
    return stage_pb2.Hop(router="r", session="s", capacity=150, digest=digest, left_s=600, read=read)


def test_returned_candidates_must_be_the_written_ones(hosts: dict[tuple[int, ...], Parts]) -> None:
    parts = hosts[0, 1, 2]
    session = SessionStore(1 << 30, 60.0).open("s", "r", "ar", 150, parts, 0.0)

    def computed(hop: stage_pb2.Hop) -> HopWork:
        work = parse_hop(copy_of(hop), parts.plan)
        work.begin(session, 3)
        while work.outcome is None:
            call = work.next_op()
            work.complete(call.compute([call.piece])[0])
        return work

    first = computed(drawing(parts))
    assert isinstance(first.outcome, stage_pb2.Hop)
    assert first.result == stage_pb2.Event(session="s", text=b"")
    other = copy_of(first.outcome)
    other.read.score.candidates[0] = b"zzzz"
    with pytest.raises(StatusError, match="the candidates that returned are not those that this host wrote"):
        computed(other)


def test_memory_of_the_drafter_is_booked_before_it_writes(hosts: dict[tuple[int, ...], Parts]) -> None:
    last, first = hosts[2,], hosts[0,]
    work = parse_hop(drawing(first), first.plan)
    model = last.drafter("ar").model  # type: ignore[union-attr]
    assert work.extra_bytes(first, 150) == 0
    assert work.extra_bytes(last, 150) == model.text_bytes(150) + 3 * model.text_bytes(4)
    with pytest.raises(StatusError, match="need a context of 513 tokens, but the drafter has 512"):
        work.extra_bytes(last, 512)
    with pytest.raises(StatusError, match=f"8 tokens to generate do not fit the session's {len(KNOWN) + 6} positions"):
        work.extra_bytes(last, len(KNOWN) + 6)
    assert work.extra_bytes(last, len(KNOWN) + 7)
    with pytest.raises(StatusError, match="this host has no drafter: give the host of the last stage the whole bundle"):
        work.extra_bytes(replace(last, ar_drafter=None), 150)
