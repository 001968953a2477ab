"""Continuous batching: who shares a pass with whom, and that nobody's text shows it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages import engine as engines
from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.engine import PASS_ROWS, Engine, Job
from stages.hop import Demand, SweepWork
from stages.parts import HostPlan, Parts, load_parts, plan_host
from stages.refusal import Refusal
from stages.scoring import BRANCH_ROWS
from stages.sessions import SessionStore
from stages.sweep import PIECE_POSITIONS
from stages.v1 import stage_pb2

Hops = Generator[stage_pb2.Hop, stage_pb2.Event, None]
Make = Callable[[], Hops]
PROMPT = b"The rain had stopped, and "


# Requests: hops, each made of the results before it


def envelope(kind: str, capacity: int) -> stage_pb2.Hop:
    deadline = int(time.time() * 1000) + 600_000
    return stage_pb2.Hop(router=kind, session=secrets.token_hex(8), capacity=capacity, deadline_unix_ms=deadline)


def sweeps(
    prompt: bytes = PROMPT, chunks: Sequence[int] = (16,), seed: int = 0, temperature: float = 0.8, **fields: Any
) -> Hops:
    """One sweep for each chunk. `router` holds the model's kind: nobody listens here."""
    hop, start, clean = envelope("chain", len(prompt) + sum(chunks[:-1])), 0, prompt
    sampling = stage_pb2.Sampling(seed=seed, temperature=temperature)
    for number, slots in enumerate(chunks):
        sweep = {"steps": 2, "codec": "int8", **fields, "clean_start": start, "clean": clean, "slots": slots}
        hop.sweep.CopyFrom(stage_pb2.Sweep(number=number, sampling=sampling, **sweep))
        event = yield hop
        start, clean = start + len(clean), event.text


def steps(
    prompt: bytes = PROMPT,
    count: int = 4,
    seed: int = 0,
    temperature: float = 0.8,
    codec: str = "fp32",
    guess: Callable[[bytes], bytes] = lambda text: b"",
) -> Hops:
    """AR steps until there are `count` bytes; `guess` may say what comes next."""
    hop, text, read = envelope("ar", len(prompt) + count - 1), b"", 0
    sampling = stage_pb2.Sampling(seed=seed, temperature=temperature)
    number = 0
    while left := count - len(text):
        guesses = guess(text)[: left - 1]
        clean = (prompt + text)[read:] + guesses
        step = {"start": read, "clean": clean, "draft": len(guesses), "remaining": 1, "codec": codec}
        hop.step.CopyFrom(stage_pb2.Step(number=number, sampling=sampling, **step))
        event = yield hop
        text += event.text
        read, number = len(prompt + text) - 1, number + 1


def scores(
    prompt: bytes = PROMPT,
    chunks: Sequence[int] = (6, 6),
    count: int = 5,
    seed: int = 0,
    temperature: float = 0.8,
    codec: str = "fp32",
) -> Hops:
    """`count` candidates for each chunk; the likeliest is the text. What comes back for it are the scores."""
    hop, clean, start = envelope("ar", len(prompt) + sum(chunks[:-1])), prompt, 0
    sampling, rng = stage_pb2.Sampling(seed=seed, temperature=temperature), np.random.default_rng(seed)
    for number, length in enumerate(chunks):
        candidates = [rng.bytes(length) for _ in range(count)]
        step = {"start": start, "clean": clean, "candidates": candidates, "remaining": 1, "codec": codec}
        hop.step.CopyFrom(stage_pb2.Step(number=number, sampling=sampling, **step))
        event = yield hop
        nats = np.frombuffer(event.scores.nats, "<f4").reshape(count, length)
        start, clean = start + len(clean), candidates[int(nats.sum(axis=1).argmax())]


# A host's engine, pass by pass


class Paced(Engine):
    """Runs on the thread of the test; hops arrive before the pass that they are due at."""

    def __init__(self, parts: Parts, **limits: int) -> None:
        super().__init__(**{"following": 3, "limit": 64, "most_hops": 64, **limits})
        self.parts, self.store = parts, SessionStore(1 << 30, 60.0)
        self.passes = 0
        self.due: list[tuple[int, Job]] = []
        self.going: dict[int, tuple[str, Hops]] = {}
        self.texts: dict[str, bytes] = {}
        """Or scores."""
        self.order: list[tuple[str, int]] = []
        """Who got a result, and in which pass."""
        self.refusals: dict[str, Refusal] = {}
        self.handed_on: dict[str, stage_pb2.Hop] = {}
        """What would go to the next host, where there is one."""

    def begin(self, name: str, hops: Hops, at: int = 1) -> Job:
        """A request whose first hop arrives before pass `at`."""
        self.texts[name] = b""
        return self._arrive(name, hops, next(hops), at)

    def finish(self) -> dict[str, bytes]:
        """Every request's text."""
        self.run(self._deliver)
        return self.texts

    def _arrive(self, name: str, hops: Hops, hop: stage_pb2.Hop, at: int) -> Job:
        kind, session = hop.router, self.store.sessions.get(hop.session)
        if session is None:
            source = self.parts.plan.model(kind)
            assert source is not None
            session = self.store.open(hop.session, "r", kind, hop.capacity, source.manifest, self.parts)
        sent = stage_pb2.Hop()
        sent.CopyFrom(hop)
        job = Job(sent, session, 0)
        self.going[id(job)] = name, hops
        self.due.append((at, job))
        return job

    def _wait(self) -> bool:
        self.passes += 1
        for entry in [entry for entry in self.due if entry[0] <= self.passes]:
            self.due.remove(entry)
            self.submit(entry[1])
        return bool(len(self) or self.due)

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            name, hops = self.going.pop(id(job))
            self.order.append((name, self.passes))
            if isinstance(job.result, Refusal):
                self.refusals[name] = job.result
                continue
            if isinstance(job.result, stage_pb2.Hop):
                self.handed_on[name] = job.result
                continue
            assert job.result is not None
            self.texts[name] += job.result.text + job.result.scores.nats
            try:
                following = hops.send(job.result)
            except StopIteration:
                continue
            self._arrive(name, hops, following, self.passes + 1)


@dataclass
class Watched(BlockRunner, StageRunner):
    """A part that writes down the pieces of every call, and fails when it is told to."""

    runner: Any
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    fails: Callable[[str, Sequence[Any]], bool] = lambda method, pieces: False

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self._call("read", pieces)

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return self._call("branch", pieces)

    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return self._call("denoise", pieces)

    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return self._call("next_byte", hidden)

    def _call(self, method: str, pieces: Sequence[Any]) -> Any:
        self.calls.append((method, list(pieces)))
        if self.fails(method, pieces):
            raise RuntimeError("boom")
        return getattr(self.runner, method)(pieces)

    def counts(self, method: str) -> list[int]:
        """Pieces in each call of a method."""
        return [len(pieces) for called, pieces in self.calls if called == method]


@pytest.fixture(scope="module")
def loaded(bundles: Path) -> dict[str, Parts]:
    """All three parts of both models, as one host holds them."""
    plans: dict[str, HostPlan] = {name: plan_host(bundles / name, (0, 1, 2)) for name in ("own", "chained")}
    return {name: load_parts(plan) for name, plan in plans.items()}


@pytest.fixture
def parts(loaded: dict[str, Parts]) -> Parts:
    """Watched runners."""
    own = loaded["own"]
    chain = {i: Watched(runner) for i, runner in own.chain.items()}
    return Parts(own.plan, chain, {i: Watched(stage) for i, stage in own.ar.items()})  # type: ignore[arg-type]


def watched(parts: Parts, part: int, kind: str = "chain") -> Watched:
    runner: Any = parts.chain[part] if kind == "chain" else parts.ar[part]
    assert isinstance(runner, Watched)
    return runner


def alone(parts: Parts, hops: Hops) -> bytes:
    engine = Paced(parts)
    engine.begin("it", hops)
    return engine.finish()["it"]


# Company changes no text

prompts = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([127, 128, 129, 256, 300]).map(lambda n: bytes((7 * i) % 251 for i in range(n))),
)
seeds = st.integers(0, 3)
temperatures = st.sampled_from([0.0, 0.8, 2.0])
sweep_requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "chunks": st.lists(st.integers(1, 40), min_size=1, max_size=3),
        "seed": seeds,
        "temperature": temperatures,
        "steps": st.integers(1, 6),
        "codec": st.sampled_from(["fp32", "int8", "int4"]),
    }
)
step_requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "count": st.integers(1, 8),
        "seed": seeds,
        "temperature": temperatures,
        "codec": st.sampled_from(["fp32", "int8"]),
    }
)
score_requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "chunks": st.lists(st.integers(1, 40), min_size=1, max_size=3),
        "count": st.integers(1, 20),
        "seed": seeds,
        "temperature": temperatures,
        "codec": st.sampled_from(["fp32", "int8"]),
    }
)
draft_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=4)
"""How many guesses, over and over."""
wrong_places = st.lists(st.booleans(), min_size=1, max_size=8)
"""Which bytes of the text are guessed wrong, over and over."""
traffic = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.one_of(
            st.tuples(st.just("sweeps"), sweep_requests),
            st.tuples(st.just("steps"), step_requests),
            st.tuples(st.just("scores"), score_requests),
            st.tuples(st.just("drafts"), st.tuples(step_requests, draft_lengths, wrong_places)),
        ),
    ),
    min_size=3,
    max_size=8,
)


def guessing(text: bytes, lengths: Sequence[int], wrong: Sequence[bool]) -> Callable[[bytes], bytes]:
    """Guesses of `text` that are wrong in places."""

    def guess(so_far: bytes) -> bytes:
        at = len(so_far)
        length = lengths[at % len(lengths)]
        return bytes(byte ^ wrong[i % len(wrong)] for i, byte in enumerate(text[at : at + length], at))

    return guess


def maker(parts: Parts, kind: str, request: Any) -> Make:
    if kind == "sweeps":
        return lambda: sweeps(**request)
    if kind == "steps":
        return lambda: steps(**request)
    if kind == "scores":
        return lambda: scores(**request)
    plain, lengths, wrong = request
    text = alone(parts, steps(**plain))
    return lambda: steps(**plain, guess=guessing(text, lengths, wrong))


@pytest.mark.parametrize("bundle", ["own", "chained"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=traffic, most_hops=st.sampled_from([64, 2, 1]), pass_rows=st.sampled_from([1000, PASS_ROWS, 50, 1]))
def test_every_request_writes_in_company_what_it_writes_alone(
    loaded: dict[str, Parts], bundle: str, requests: list[Any], most_hops: int, pass_rows: int
) -> None:
    parts = loaded[bundle]
    makers = [(at, maker(parts, kind, request)) for at, (kind, request) in requests]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "PASS_ROWS", pass_rows)
        engine = Paced(parts, most_hops=most_hops)
        for i, (at, make) in enumerate(makers):
            engine.begin(str(i), make(), at)
        together = engine.finish()
    assert engine.refusals == {}
    assert together == {str(i): alone(parts, make()) for i, (_, make) in enumerate(makers)}


def crowd() -> dict[str, Make]:
    """Requests of every kind and size, that come in at four passes."""
    makers: dict[str, Make] = {}
    for i in range(24):
        prompt, seed, temperature = bytes((i + 7 * j) % 251 for j in range(1 + 11 * i)), i, 0.4 * (i % 3)
        fields: dict[str, Any] = {"prompt": prompt, "seed": seed, "temperature": temperature}
        if i % 4 == 3:
            makers[str(i)] = lambda fields=fields, i=i: scores(**fields, chunks=(1 + i, 9), count=1 + 2 * i)
        elif i % 3 == 0:
            makers[str(i)] = lambda fields=fields, i=i: sweeps(
                **fields, chunks=(3 + i, 9), steps=2 + i % 5, codec="fp32"
            )
        elif i % 3 == 1:
            makers[str(i)] = lambda fields=fields: steps(**fields, count=5)
        else:
            makers[str(i)] = lambda fields=fields, i=i: steps(**fields, count=12, guess=lambda text, i=i: bytes(i % 9))
    return makers


@pytest.mark.parametrize("bundle", ["own", "chained"])
def test_a_crowd_writes_what_each_writes_alone(loaded: dict[str, Parts], bundle: str) -> None:
    engine, makers = Paced(loaded[bundle]), crowd()
    for i, (name, make) in enumerate(makers.items()):
        engine.begin(name, make(), at=1 + i % 4)
    assert engine.finish() == {name: alone(loaded[bundle], make()) for name, make in makers.items()}
    assert len({at for _, at in engine.order}) < len(engine.order) / 2, "they hardly met"


@pytest.mark.parametrize("blocks", [(0,), (0, 1)], ids=str)
@pytest.mark.parametrize("bundle", ["own", "chained"])
def test_what_a_host_hands_on_is_the_same_to_the_last_bit(bundles: Path, bundle: str, blocks: tuple[int, ...]) -> None:
    """In fp32: a text would hide small differences."""
    parts = load_parts(plan_host(bundles / bundle, blocks))
    together = Paced(parts, following=len(blocks))
    for name, make in crowd().items():
        together.begin(name, make(), at=1 + int(name) % 4)
    together.finish()
    for name, make in crowd().items():
        single = Paced(parts, following=len(blocks))
        single.begin(name, make())
        single.finish()
        ours, theirs = together.handed_on[name], single.handed_on[name]
        assert ours.WhichOneof("work") == theirs.WhichOneof("work")
        assert (ours.sweep.block, ours.step.stage) == (theirs.sweep.block, theirs.step.stage)
        assert ours.sweep.estimate == theirs.sweep.estimate
        assert ours.sweep.features == theirs.sweep.features
        assert ours.step.hidden == theirs.step.hidden
        assert ours.sweep.estimate or ours.step.hidden


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=step_requests, lengths=draft_lengths, wrong=wrong_places)
def test_guesses_change_no_byte(
    loaded: dict[str, Parts], request: dict[str, Any], lengths: list[int], wrong: list[bool]
) -> None:
    """Right, wrong or in part: what comes out is what the pipeline writes step by step."""
    text = alone(loaded["own"], steps(**request))
    assert alone(loaded["own"], steps(**request, guess=guessing(text, lengths, wrong))) == text


def test_right_guesses_are_all_accepted_in_one_hop(loaded: dict[str, Parts]) -> None:
    text = alone(loaded["own"], steps(count=20))
    engine = Paced(loaded["own"])
    engine.begin("right", steps(count=20, guess=lambda so_far: text[len(so_far) :]))
    engine.begin("wrong", steps(count=20, guess=lambda so_far: bytes(b ^ 1 for b in text[len(so_far) :][:5])))
    assert engine.finish() == {"right": text, "wrong": text}
    assert [name for name, _ in engine.order].count("right") == 1
    assert [name for name, _ in engine.order].count("wrong") == 20


# Who takes part in a pass


def test_hops_that_are_there_together_share_every_pass(parts: Parts) -> None:
    engine = Paced(parts)
    for i in range(5):
        engine.begin(str(i), sweeps(seed=i, chunks=(8 + i,)))
    engine.finish()
    for i in range(3):
        assert set(watched(parts, i).counts("denoise")) == {5}
        assert watched(parts, i).counts("read") == [5]


def test_a_hop_joins_at_the_next_pass_and_shares_a_part_with_those_at_other_noise_levels(parts: Parts) -> None:
    engine = Paced(parts)
    engine.begin("early", sweeps())
    engine.begin("late", sweeps(seed=1), at=2)
    engine.finish()
    first, *others = (pieces for method, pieces in watched(parts, 0).calls if method == "denoise")
    assert (len(first), [len(pieces) for pieces in others]) == (1, [2, 1])
    early, late = others[0]
    assert early.sigma < late.sigma
    assert [name for name, _ in engine.order] == ["early", "late"]
    assert engine.order[1][1] == engine.order[0][1] + 1


def test_a_long_prompt_does_not_hold_up_a_step(parts: Parts) -> None:
    """A pass takes one piece of each prompt, so a byte that is due goes out with the very pass that it joins."""
    engine = Paced(parts)
    engine.begin("long", steps(prompt=bytes(4 * PIECE_POSITIONS - 8), count=1))
    engine.begin("sweep", sweeps(prompt=bytes(3 * PIECE_POSITIONS), chunks=(100,)))
    engine.begin("short", steps(count=6))
    engine.finish()
    assert [at for name, at in engine.order if name == "short"] == [1, 2, 3, 4, 5, 6]
    assert ("long", 4) in engine.order
    assert max(len(p.source) for _, pieces in watched(parts, 0, "ar").calls for p in pieces) == PIECE_POSITIONS
    reads = [pieces for method, pieces in watched(parts, 0).calls if method == "read"]
    assert [len(piece.source) for pieces in reads for piece in pieces] == [PIECE_POSITIONS] * 3


def test_steps_go_through_all_stages_of_the_host_in_one_pass_and_together(parts: Parts) -> None:
    engine = Paced(parts)
    for i in range(7):
        engine.begin(str(i), steps(seed=i, count=3))
    engine.finish()
    assert {at for _, at in engine.order} == {1, 2, 3}
    for stage in range(3):
        assert watched(parts, stage, "ar").counts("read") == [7, 7, 7]
    assert watched(parts, 2, "ar").counts("next_byte") == [7, 7, 7]


def test_the_oldest_sweeps_fill_a_pass_first(parts: Parts) -> None:
    engine = Paced(parts)
    for name in "abcdefg":
        engine.begin(name, sweeps(prompt=b"x", chunks=(100,), seed=ord(name)))
    engine.finish()
    assert [name for name, _ in engine.order] == list("abcdefg")
    passes = [at for _, at in engine.order]
    assert passes[0] == passes[2] < passes[3] == passes[5] < passes[6]
    for i in range(3):
        rows = [[len(piece.z) for piece in pieces] for method, pieces in watched(parts, i).calls if method == "denoise"]
        assert max(sum(sizes) for sizes in rows) == 300
        assert all(sum(sizes[:-1]) < PASS_ROWS for sizes in rows), "a sweep more than fits"


def test_a_sweep_over_the_size_of_a_pass_is_served_all_the_same(parts: Parts) -> None:
    engine = Paced(parts)
    engine.begin("large", sweeps(prompt=b"x", chunks=(400,)))
    engine.begin("small", sweeps(prompt=b"x", chunks=(4,)))
    assert {name: len(text) for name, text in engine.finish().items()} == {"large": 400, "small": 4}
    assert [name for name, _ in engine.order] == ["large", "small"]


def test_sweeps_do_not_hold_up_steps(parts: Parts) -> None:
    engine = Paced(parts)
    for i in range(6):
        engine.begin(f"sweep {i}", sweeps(chunks=(120,)))
    engine.begin("step", steps(count=5), at=3)
    engine.finish()
    assert [at for name, at in engine.order if name == "step"] == [3, 4, 5, 6, 7]


def test_candidates_do_not_hold_up_steps(parts: Parts) -> None:
    """They are evaluated in pieces of whole branches, beside the steps of others."""
    engine = Paced(parts)
    engine.begin("scores", scores(chunks=(32,), count=32))
    engine.begin("step", steps(count=8))
    engine.finish()
    assert [at for name, at in engine.order if name == "step"] == list(range(1, 9))
    for stage in range(3):
        branched = [pieces for method, pieces in watched(parts, stage, "ar").calls if method == "branch"]
        assert [tuple(piece.source.shape[:2]) for (piece,) in branched] == [(8, 31)] * 4
    heads = [
        len(piece) for method, pieces in watched(parts, 2, "ar").calls if method == "next_byte" for piece in pieces
    ]
    assert max(heads) == BRANCH_ROWS
    assert sum(heads) == 1 + 32 * 31 + 8


def test_candidates_and_sweeps_share_what_is_left_of_a_pass(parts: Parts) -> None:
    engine = Paced(parts)
    engine.begin("scores", scores(chunks=(16,), count=8))
    engine.begin("sweep", sweeps(chunks=(100,)))
    engine.begin("late", scores(chunks=(32,), count=64))
    engine.finish()
    assert [name for name, _ in engine.order] == ["scores", "sweep", "late"]


def test_a_batch_of_one_is_one_after_the_other(parts: Parts) -> None:
    engine = Paced(parts, most_hops=1)
    engine.begin("a", sweeps())
    engine.begin("b", steps(count=1))
    engine.begin("c", sweeps(seed=1))
    engine.finish()
    assert [name for name, _ in engine.order] == ["a", "b", "c"]
    calls = [call for part in range(3) for call in watched(parts, part).calls]
    assert {len(pieces) for _, pieces in calls} == {1}
    owners = [id(pieces[0].caches) for _, pieces in watched(parts, 0).calls]
    assert owners == sorted(owners, key=owners.index), "they took turns"


def test_a_batch_of_two(parts: Parts) -> None:
    engine = Paced(parts, most_hops=2)
    for name in "abc":
        engine.begin(name, sweeps(seed=ord(name)))
        engine.begin(name + name, steps(seed=ord(name), count=2))
    engine.finish()
    assert max(watched(parts, 0).counts("denoise")) == 2
    assert max(watched(parts, 0, "ar").counts("read")) == 2
    assert [name for name, _ in engine.order if len(name) == 1] == ["a", "b", "c"]


# Hops that fail, and those that nobody waits for


def names_of(failed: Iterable[tuple[str, Refusal]], code: grpc.StatusCode) -> set[str]:
    return {name for name, refusal in failed if refusal.code is code}


def test_a_call_that_fails_ends_those_in_it_and_nobody_else(parts: Parts) -> None:
    """Of two that are in block 1 when it fails, and others that are not."""
    expected = {name: alone(parts, make()) for name, make in (("later", sweeps), ("step", lambda: steps(count=9)))}
    engine = Paced(parts)
    engine.begin("one", sweeps())
    engine.begin("two", sweeps(seed=1))
    engine.begin("later", sweeps(), at=3)
    engine.begin("step", steps(count=9))
    watched(parts, 1).fails = lambda method, pieces: method == "denoise" and len(pieces) == 2
    texts = engine.finish()
    assert names_of(engine.refusals.items(), grpc.StatusCode.INTERNAL) == {"one", "two"}
    assert "the host's log says why" in engine.refusals["one"].message
    assert {name: texts[name] for name in expected} == expected


def test_candidates_that_fail_harm_nobody_else(parts: Parts) -> None:
    expected = alone(parts, steps(count=9))
    engine = Paced(parts)
    engine.begin("bad", scores())
    engine.begin("step", steps(count=9))
    watched(parts, 1, "ar").fails = lambda method, pieces: method == "branch"
    assert engine.finish()["step"] == expected
    assert names_of(engine.refusals.items(), grpc.StatusCode.INTERNAL) == {"bad"}


def test_a_step_that_ended_keeps_its_result_when_sweeps_of_its_pass_fail(parts: Parts) -> None:
    engine = Paced(parts)
    engine.begin("step", steps(count=1))
    engine.begin("sweep", sweeps())
    watched(parts, 0).fails = lambda method, pieces: True
    texts = engine.finish()
    assert len(texts["step"]) == 1
    assert set(engine.refusals) == {"sweep"}


def test_what_cannot_begin_fails_alone(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Paced(parts)
    bad = engine.begin("bad", sweeps())
    engine.begin("good", sweeps())
    bad.session.caches.clear()
    assert len(engine.finish()["good"]) == 16
    assert names_of(engine.refusals.items(), grpc.StatusCode.INTERNAL) == {"bad"}


def test_what_cannot_go_on_fails_alone(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Paced(parts)
    engine.begin("bad", sweeps(seed=77))
    engine.begin("good", sweeps())
    whole = SweepWork.demand

    def demand(work: SweepWork) -> Demand:
        if work.hop.sweep.sampling.seed == 77:
            raise RuntimeError("boom")
        return whole(work)

    monkeypatch.setattr(SweepWork, "demand", demand)
    assert len(engine.finish()["good"]) == 16
    assert names_of(engine.refusals.items(), grpc.StatusCode.INTERNAL) == {"bad"}


def test_a_hop_that_nobody_waits_for_ends_without_being_computed(parts: Parts) -> None:
    engine = Paced(parts)
    for name in ("released", "late", "wanted"):
        job = engine.begin(name, sweeps())
        job.session.released = name == "released"
        job.hop.deadline_unix_ms = 1 if name == "late" else job.hop.deadline_unix_ms
    engine.finish()
    assert {name: refusal.code for name, refusal in engine.refusals.items()} == {
        "released": grpc.StatusCode.CANCELLED,
        "late": grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert set(watched(parts, 0).counts("denoise")) == {1}
    assert engine.order[:2] == [("released", 1), ("late", 1)], "with the pass that they came in"


@pytest.mark.parametrize("how", ["released", "late"])
def test_a_hop_under_way_ends_at_the_next_pass(parts: Parts, how: str) -> None:
    engine = Paced(parts)
    job = engine.begin("it", sweeps(chunks=(16, 16)))
    engine.begin("other", sweeps(seed=3))

    def meddle(method: str, pieces: Sequence[Any]) -> bool:
        job.session.released = how == "released"
        job.hop.deadline_unix_ms = 1 if how == "late" else job.hop.deadline_unix_ms
        return False

    watched(parts, 1).fails = meddle
    assert len(engine.finish()["other"]) == 16
    assert set(engine.refusals) == {"it"}
    assert max(watched(parts, 2).counts("denoise")) == 1, "it went on into the last block"


def test_two_hops_of_one_session_are_done_in_their_order(parts: Parts) -> None:
    """They share caches: the second waits for the end of the first, and others do not wait for it."""
    text = alone(parts, steps(prompt=bytes(200), count=2))
    ahead = steps(prompt=bytes(200), count=2)
    first = next(ahead)
    engine = Paced(parts)
    engine.begin("other", steps(count=3))
    jobs = [engine._arrive("first", iter_of(), first, 1)]
    second = ahead.send(stage_pb2.Event(text=text[:1]))
    jobs.append(engine._arrive("second", iter_of(), second, 1))
    assert jobs[0].session is jobs[1].session
    engine.texts.update(first=b"", second=b"")
    texts = engine.finish()
    assert texts["first"] + texts["second"] == text
    assert sorted(engine.order) == [("first", 2), ("other", 1), ("other", 2), ("other", 3), ("second", 3)]


def iter_of() -> Hops:
    """A request that ends with the hop that was sent."""

    def nothing() -> Hops:
        yield stage_pb2.Hop()

    hops = nothing()
    next(hops)
    return hops


# Limits, and the end


def test_hops_under_way_are_counted_up_to_the_limit(parts: Parts) -> None:
    engine = Paced(parts, limit=3)
    for i in range(3):
        assert (len(engine), engine.full) == (i, False)
        engine.submit(engine.begin(str(i), sweeps()))
    assert (len(engine), engine.full) == (3, True)
    engine.due.clear()
    engine.finish()
    assert (len(engine), engine.full) == (0, False)


def test_shares_of_passes_add_up_to_no_more_than_the_time_there_was(parts: Parts) -> None:
    engine = Paced(parts)
    begin = time.perf_counter()
    jobs = [engine.begin(str(i), sweeps(seed=i)) for i in range(4)]
    engine.finish()
    elapsed_ms = (time.perf_counter() - begin) * 1000
    assert all(job.compute_ms > 0 and job.queue_ms >= 0 for job in jobs)
    assert sum(job.compute_ms for job in jobs) <= elapsed_ms
    assert all(job.compute_ms + job.queue_ms <= elapsed_ms for job in jobs)


# On which thread


def job_of(engine: Engine, parts: Parts, hops: Hops) -> Job:
    """A request's first hop, submitted."""
    hop = next(hops)
    source = parts.plan.model(hop.router)
    assert source is not None
    session = SessionStore(1 << 30, 60.0).open("s", "r", hop.router, hop.capacity, source.manifest, parts)
    job = Job(hop, session, 0)
    engine.submit(job)
    return job


@dataclass
class Threaded:
    """An engine with its thread."""

    parts: Parts
    engine: Engine = field(default_factory=lambda: Engine(3, 64, 64))
    ended: SimpleQueue[Job] = field(default_factory=SimpleQueue)

    def __enter__(self) -> Threaded:
        def deliver(jobs: list[Job]) -> None:
            for job in jobs:
                self.ended.put(job)

        self.thread = threading.Thread(target=self.engine.run, args=(deliver,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.ended.empty()


def test_a_sweep_is_computed_on_the_thread_which_then_sleeps(loaded: dict[str, Parts]) -> None:
    with Threaded(loaded["own"]) as it:
        for _ in range(3):  # between them there is nothing to do
            job = job_of(it.engine, it.parts, sweeps())
            assert it.engine.go() == []
            assert it.ended.get(timeout=60) is job
            assert isinstance(job.result, stage_pb2.Event)


def test_a_quick_step_is_computed_at_once(loaded: dict[str, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUICK_MS", 1000.0)  # this machine may be busy
    engine, expected = Engine(3, 64, 64), alone(loaded["own"], steps(count=1))
    for _ in range(3):
        job = job_of(engine, loaded["own"], steps(count=1))
        assert engine.go() == [job]
        assert isinstance(job.result, stage_pb2.Event)
        assert job.result.text == expected
    assert len(engine) == 0


@pytest.mark.parametrize(
    ("hops", "quick_ms"),
    [
        (sweeps, engines.QUICK_MS),
        (lambda: steps(prompt=bytes(engines.QUICK_ROWS + 1)), engines.QUICK_MS),
        (scores, engines.QUICK_MS),
        (steps, 0.0),
    ],
    ids=["sweep", "long prompt", "candidates", "slow model"],
)
def test_what_may_take_long_is_left_to_the_thread(
    loaded: dict[str, Parts], monkeypatch: pytest.MonkeyPatch, hops: Make, quick_ms: float
) -> None:
    monkeypatch.setattr(engines, "QUICK_MS", quick_ms)
    engine = Engine(3, 64, 64)
    job = job_of(engine, loaded["own"], hops())
    assert (engine.go(), len(engine), job.result) == ([], 1, None)


def test_a_quick_step_joins_what_the_thread_is_at(loaded: dict[str, Parts]) -> None:
    """It shares the sweeps' next pass, instead of computing beside them."""
    engine = Engine(3, 64, 64)
    job_of(engine, loaded["own"], sweeps())
    engine._turn()  # the thread is between two passes
    job = job_of(engine, loaded["own"], steps())
    assert (engine.go(), len(engine)) == ([], 2)
    assert engine._turn() == [job]


def test_hops_may_be_taken_in_while_they_are_looked_at(loaded: dict[str, Parts]) -> None:
    engine = Engine(3, 64, 64)
    first, second = (job_of(engine, loaded["own"], steps(seed=i)) for i in range(2))

    class Seen:
        """A hop that the engine's thread takes in while the event loop looks at it."""

        step = first.hop.step

        def WhichOneof(self, group: str) -> str:
            engine._arrived.clear()
            return "step"

    first.hop = Seen()  # type: ignore[assignment]
    assert engine._is_quick()
    assert len(engine) == 0
    assert second.result is None
