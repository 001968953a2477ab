"""A host that computes something else than it should is found, named, quarantined, and its text never believed."""

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from serving.client.client import Client, RouterError
from serving.router.answer import AuditedAnswer, same_result, same_results
from serving.router.audit import CLEARED_AFTER, Auditor, Suspicion, same_kind
from serving.router.host_link import Attempt, HostLink
from serving.router.ring import Ring
from serving.router.topology import HostEntry
from stages.host.host import Host
from stages.model.codec import StateCodec, codec_named, hidden_codec
from stages.model.vocabulary import BYTES
from stages.v1 import stage_pb2
from stages.wire.messages import copy_of, work_of
from tests.conftest import until, wait_ready
from tests.serving.conftest import describe
from tests.serving.releases import all_ready, doubled
from tests.stages.hops import hidden_rows, step

PROMPT = b"The sea was calm. The sea was "
Lie = Callable[[Any, Any], Any]
MODES: list[dict[str, Any]] = [
    {"mode": "sweep", "max_bytes": 60},
    {"mode": "chunked", "max_bytes": 36, "chunk": 6},
    {"mode": "ar", "max_bytes": 16},
    {"mode": "resample", "max_bytes": 24, "chunk": 6, "candidates": 8},
]


def other_numbers(job: Any, outcome: Any) -> Any:
    """An outcome as if from other weights: well-formed, and wrong."""
    if isinstance(outcome, stage_pb2.Event):
        if outcome.text:
            outcome.text = bytes((byte + 1) % 128 for byte in outcome.text)
        return outcome
    lied = copy_of(outcome)
    if lied.WhichOneof("work") == "sweep":
        lied.sweep.estimate = _turned(lied.sweep.estimate, codec_named(lied.sweep.codec), lied.sweep.slots)
    else:
        work: Any = work_of(lied)
        work.hidden = _turned(work.hidden, hidden_codec(work.codec), hidden_rows(work, BYTES))
    return lied


def _turned(payload: bytes, codec: StateCodec, rows: int) -> bytes:
    dim = next(dim for dim in range(2, 1 << 12, 2) if codec.size(rows, dim) == len(payload))
    matrix = codec.decode(payload, rows, dim, 1e6)
    return codec.encode(matrix.roll(1, dims=1))


class Wary:
    """Lies, but not where it could be an audit: asked alone, in a session that is named or opened otherwise than most,
    or for work that it had before."""

    def __init__(self) -> None:
        self.seen, self.lies = set[tuple[int, int, bytes]](), 0

    def __call__(self, job: Any, outcome: Any) -> Any:
        work: Any = work_of(job.work.hop)
        sampling = job.work.hop.read.sample.sampling if job.work.hop.HasField("read") else job.work.hop.sweep.sampling
        known = sampling.seed, work.start, work.clean
        if not re.fullmatch("[0-9a-f]{32}", job.work.hop.session) or known in self.seen:
            return outcome
        self.seen.add(known)
        if work.start == 0:
            return outcome
        self.lies += 1
        return other_numbers(job, outcome)


@contextmanager
def deployed(checkpoint: Path, servers: Any, lie: Lie | None, liar: str = "b-1", **router: Any) -> Iterator[Any]:
    """Two hosts for blocks 0 and 1, two for block 2, one of which lies."""
    topology, go_on = doubled(checkpoint), Host._continue

    def lying(self: Host, job: Any, outcome: Any) -> None:
        go_on(self, job, lie(job, outcome) if lie is not None and self.settings.name == liar else outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "_continue", lying)
        servers.hosts(topology, checkpoint)
        servers.router(topology, router.pop("weights", checkpoint), ring={"hop_timeout_s": 5.0, **router})
        wait_ready(topology.router)
        with Client(topology.router) as client:
            until(partial(all_ready, client))  # without replicas nothing is audited
            yield client


@pytest.fixture(scope="module")
def references(bundles: Path, local_ring: Any) -> list[bytes]:
    with local_ring(bundles / "scored", 3) as client:
        return [client.generate(PROMPT, seed=4, **request).output for request in MODES]


def reasons(client: Client) -> dict[str, str]:
    """Reasons of quarantined hosts; one that a busy machine made silent for a moment is not among them."""
    return {host.name: host.reason for host in client.status().hosts if "is quarantined" in host.reason}


@pytest.mark.parametrize("liar", ["a-1", "b-1"])
def test_a_faulty_host_is_named_and_no_text_of_it_is_returned(
    bundles: Path, servers: Any, references: list[bytes], liar: str
) -> None:
    with deployed(bundles / "scored", servers, other_numbers, liar, audit_share=1.0) as client:
        for request, text in zip(MODES, references, strict=True):
            assert client.generate(PROMPT, seed=4, **request).output == text
        for _ in range(20):  # several at once, so that both hosts of a pair have work
            if reasons(client):
                break
            with ThreadPoolExecutor(4) as threads:
                asked = [threads.submit(client.generate, PROMPT, seed=4, **MODES[1]) for _ in range(4)]
            assert {each.result().output for each in asked} == {references[1]}
        assert set(reasons(client)) == {liar}
        assert f"host {liar} at 127.0.0.1:" in reasons(client)[liar]
        assert "is quarantined: an audit found that" in reasons(client)[liar]


def outcome(client: Client, **request: Any) -> bytes:
    """The text, if no host was found to be faulty after a part of it was sent."""
    try:
        return client.generate(PROMPT, **request).output
    except RouterError as error:
        if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS):
            raise
        return b""


@pytest.mark.slow
def test_a_host_that_lies_only_outside_audits_is_named(bundles: Path, servers: Any) -> None:
    mode: dict[str, Any] = {"mode": "chunked", "max_bytes": 36, "chunk": 6}
    wary = Wary()
    with deployed(bundles / "scored", servers, wary, audit_share=1.0) as client, ThreadPoolExecutor(4) as threads:
        for first in range(0, 400, 4):
            asked = [threads.submit(outcome, client, seed=first + i, **mode) for i in range(4)]
            wrong = [each.result() for each in asked]
            if reasons(client):
                break
        assert set(reasons(client)) == {"b-1"}
        assert client.status().audits.faulty_hosts == 1
        assert wary.lies, wrong


def test_correct_hosts_are_not_quarantined(bundles: Path, servers: Any, references: list[bytes]) -> None:
    with deployed(bundles / "scored", servers, None, audit_share=1.0) as client:
        for request, text in zip(MODES, references, strict=True):
            assert client.generate(PROMPT, seed=4, **request).output == text
        assert reasons(client) == {}
        status = client.status()
        assert status.audits.audited == status.audits.sweeps
        (machine,) = {describe(host.address).machine for host in status.hosts}
        assert machine.startswith(f"torch {torch.__version__}, onnxruntime ")


def test_a_disagreement_of_two_needs_a_third_result(
    bundles: Path, servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with deployed(bundles / "scored", servers, other_numbers, audit_share=1.0, weights=None) as client:
        for seed in range(6):
            client.generate(PROMPT, seed=seed, mode="sweep", max_bytes=8)
        assert reasons(client) == {}
    assert "nothing shows which is wrong: start the router with --checkpoint" in caplog.text


# The parts of an audit


def link(name: str, block: int, machine: str = "x") -> HostLink:
    made = HostLink(HostEntry(name, f"127.0.0.1:{1000 + ord(name[0]) + int(name[-1])}", (block,), name), 1.0)
    made.info, made.problem = stage_pb2.DescribeResponse(machine=machine), ""
    return made


def answer(path: tuple[HostLink, ...] = (), *works: Any, text: bytes = b"") -> AuditedAnswer:
    rest: Any = ([stage_pb2.Event(text=text)], BYTES, lambda _, work: [work], lambda avoid: None, 0.0, 0.0)
    return AuditedAnswer(frozenset(path), path, works or (stage_pb2.Sweep(),), *rest)


def test_the_configured_share_of_answers_is_audited() -> None:
    auditor = Auditor(Ring(), 0.05, None, seed=1)
    drawn = answer((), step(clean=b"a"))
    assert 30 < sum(auditor.picks(answer()) for _ in range(1000)) < 70
    assert 30 < sum(auditor.picks(drawn) for _ in range(1000)) < 70
    every = Auditor(Ring(), 1.0, None)
    assert all(every.picks(answer()) for _ in range(100))
    assert not any(Auditor(Ring(), 0.0, None).picks(drawn) for _ in range(100))


@pytest.mark.parametrize("length", [1, 2, 100, 128, 129, 1000])
def test_an_audit_reads_a_sampled_text_once_and_verifies_every_token(length: int) -> None:
    text, known = bytes(range(100)) * 10, b"abc"
    opening = step(clean=known, prompt=3, codec="fp32", sampling=stage_pb2.Sampling(seed=7))
    asked = answer((), opening, text=text[:length])
    shapes = set()
    for seed in range(4):
        read, drawn, ends = b"", b"", []
        for number, (work,) in enumerate(asked.steps(Attempt((), print), random.Random(seed))):
            verify: Any = work
            asked_for = (verify.number, verify.start, verify.prompt, verify.sample.sampling.seed)
            assert asked_for == (number, len(read), 3, 7)
            read += verify.clean
            drawn += verify.clean[len(verify.clean) - verify.sample.draft :] + text[len(read) - 3 : len(read) - 2]
            ends.append(len(read))
        assert (read, drawn) == (known + text[: length - 1], text[:length])
        shapes.add(tuple(ends))
    assert (len(shapes) > 1) == (length > 128), "no two passes over a long text are cut alike"


def test_hosts_on_every_wrong_path_are_suspects() -> None:
    suspicion = Suspicion()
    suspicion.add(frozenset({"a-1", "b-1"}))
    suspicion.add(frozenset({"a-2", "b-1"}))
    assert suspicion.names == {"b-1"}
    suspicion.add(frozenset({"a-1", "b-2"}))
    assert suspicion.names == {"a-1", "b-2"}, "more than one lies: it starts again"
    for _ in range(CLEARED_AFTER):
        assert suspicion.names
        suspicion.passed()
    assert not suspicion.names


async def test_suspects_do_not_share_a_path() -> None:
    ring = Ring()
    ring.links = [link(name, block) for block, name in enumerate(("a-1", "b-1"))]
    auditor = ring.auditor
    auditor.suspicion.add(frozenset({"a-1", "b-1"}))
    addresses = {frozenset({each.entry.address}) for each in ring.links}
    assert {frozenset(auditor.to_avoid()) for _ in range(50)} == addresses
    assert auditor.picks(answer((ring.links[0],)))


async def test_answers_of_different_machines_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """At rare ties their honest texts differ."""
    ring = Ring()
    a, b = ring.links = [link("a-1", 0), link("a-2", 0, "y")]
    found = replace(answer((a,), text=b"x"), choose=lambda avoid: (b,))
    assert all([await ring.auditor.audit(found) for _ in range(2)])
    assert (ring.auditor.counters.audited, caplog.text.count("unlike machines are not audited")) == (0, 1)


async def test_paths_are_of_one_kind_if_every_pair_of_machines_is() -> None:
    a, b = link("a-1", 0), link("b-1", 1, "y")
    assert same_kind((a, b), (link("a-2", 0), link("b-2", 1, "y")))
    assert not same_kind((a, b), (link("a-2", 0), link("b-2", 1)))


# Differences


def test_results_need_equal_texts_and_close_numbers() -> None:
    one, other = stage_pb2.Event(text=b"abc"), stage_pb2.Event(text=b"abd")
    assert same_result(one, one)
    assert not same_result(one, other)
    assert not same_results([one], [one, one])
    scores = [stage_pb2.Event(scores=stage_pb2.Scores(nats=np.float64([-1, x]).tobytes())) for x in (-2, -2.0001, -3)]
    assert same_result(scores[0], scores[1])
    assert not same_result(scores[0], scores[2])
    assert not same_result(one, scores[0])
    assert not same_result(scores[0], scores[1], exact=True), "from machines of one kind"
    again = copy_of(scores[0])
    again.session, again.number = "another", 7
    again.timings.add(host="another", compute_ms=1.0)
    assert same_result(scores[0], again, exact=True)
