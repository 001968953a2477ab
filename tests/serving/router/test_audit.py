"""A host that computes something else than it should is found, named, quarantined, and its text never believed."""

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from onesweep.serving.client.client import Client, RouterError
from onesweep.serving.router.audit import AuditCounters, Auditor, agree
from onesweep.serving.router.paths import HostLink
from onesweep.serving.router.ring import Ring
from onesweep.serving.router.topology import HostEntry
from onesweep.stages.host.host import Host
from onesweep.stages.model.codec import HIDDEN, Int8, StateCodec, codec_named, hidden_codec
from onesweep.stages.model.vocabulary import BYTES
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.hop_stream import Relay
from onesweep.stages.wire.messages import copy_of, hidden_rows, work_of
from onesweep.stages.wire.status import StatusError
from tests.conftest import wait_ready
from tests.serving.router.test_replicas import doubled

PROMPT = b"The sea was calm. The sea was "
Lie = Callable[[Host, Any], Any]
MODES: list[dict[str, Any]] = [
    {"mode": "sweep", "max_bytes": 60},
    {"mode": "chunked", "max_bytes": 36, "chunk": 6},
    {"mode": "ar", "max_bytes": 16},
    {"mode": "resample", "max_bytes": 24, "chunk": 6, "candidates": 8},
    {"mode": "verified", "max_bytes": 24},
    {"mode": "infill", "max_bytes": 30, "chunk": 10, "suffix": b" and so on"},
]


def other_numbers(host: Host, outcome: Any) -> Any:
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
    matrix = codec.decode(payload, rows, codec.dim(len(payload), rows), 1e6)
    return codec.encode(matrix.roll(1, dims=1))


@contextmanager
def deployed(checkpoint: Path, servers: Any, lie: Lie | None, alone: bool, **router: Any) -> Iterator[Any]:
    """Two hosts for blocks 0 and 1, two for block 2; b-1 lies. `alone`: also when it is asked alone."""
    topology, go_on = doubled(checkpoint), Host._go_on

    def lying(self: Host, job: Any, outcome: Any) -> None:
        lies = lie is not None and self.settings.name == "b-1" and (alone or job.reply is None)
        go_on(self, job, lie(self, outcome) if lies and lie else outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "_go_on", lying)
        servers.hosts(topology, checkpoint)
        servers.router(topology, router.pop("weights", checkpoint), ring={"hop_timeout_s": 5.0, **router})
        wait_ready(topology.router)
        with Client(topology.router) as client:
            yield client


def silent_of(name: str, refuses: bool = False) -> Callable[..., Any]:
    """`Host.run`, but that this host gives no answer."""
    run = Host.run

    async def silent(self: Host, hop: stage_pb2.Hop) -> Any:
        if self.settings.name != name:
            return await run(self, hop)
        if not refuses:
            await asyncio.Event().wait()
        raise StatusError(grpc.StatusCode.PERMISSION_DENIED, "not to you")

    return silent


@pytest.fixture(scope="module")
def references(bundles: Path, local_ring: Any) -> list[bytes]:
    with local_ring(bundles / "scored", 3) as client:
        return [client.generate(PROMPT, seed=4, **request).output for request in MODES]


def reasons(client: Client) -> dict[str, str]:
    """Of hosts that were taken out; one that a busy machine made silent for a moment is none of them."""
    return {host.name: host.reason for host in client.status().hosts if "is quarantined" in host.reason}


def sweep_until_one_is_named(client: Client, count: int) -> None:
    """At most `count` sweeps, several at once, so that both hosts of a pair have work: else the nearer has it all."""
    with ThreadPoolExecutor(4) as threads:
        for first in range(0, count, 4):
            settings = {"mode": "sweep", "max_bytes": 8, "steps": 1}
            asked = [threads.submit(client.generate, PROMPT, seed=first + i, **settings) for i in range(4)]
            for each in asked:
                try:
                    each.result()
                except RouterError as error:  # three wrong sweeps in a row, and nobody could be named
                    if error.code is not grpc.StatusCode.UNAVAILABLE:
                        raise
            if reasons(client):
                return


@pytest.mark.parametrize("alone", [True, False], ids=["always", "only in the ring"])
def test_a_liar_is_named_and_no_request_believes_it(
    bundles: Path, servers: Any, references: list[bytes], alone: bool
) -> None:
    with deployed(bundles / "scored", servers, other_numbers, alone, audit_share=1.0) as client:
        for request, text in zip(MODES, references, strict=True):
            assert client.generate(PROMPT, seed=4, **request).output == text
        for _ in range(20):  # several at once, so that both hosts of a pair have work
            if reasons(client):
                break
            with ThreadPoolExecutor(4) as threads:
                asked = [threads.submit(client.generate, PROMPT, seed=4, **MODES[1]) for _ in range(4)]
            assert {each.result().output for each in asked} == {references[1]}
        assert set(reasons(client)) == {"b-1"}
        assert "host b-1 at 127.0.0.1:" in reasons(client)["b-1"]
        assert "is quarantined: an audit found that" in reasons(client)["b-1"]


def test_honest_hosts_stay(bundles: Path, servers: Any, references: list[bytes]) -> None:
    with deployed(bundles / "scored", servers, None, True, audit_share=1.0) as client:
        for request, text in zip(MODES, references, strict=True):
            assert client.generate(PROMPT, seed=4, **request).output == text
        assert reasons(client) == {}


def test_a_liar_that_lies_now_and_then_brings_no_blame_on_others(bundles: Path, servers: Any) -> None:
    """In the ring alone, where only leaving hosts out can find it."""
    turns = random.Random(3)

    def now_and_then(host: Host, outcome: Any) -> Any:
        return other_numbers(host, outcome) if turns.random() < 0.5 else outcome

    with deployed(bundles / "scored", servers, now_and_then, False, audit_share=1.0) as client:
        sweep_until_one_is_named(client, 1000)  # it must be asked, and lie three times
        assert set(reasons(client)) == {"b-1"}
        assert client.status().audits.faulty_hosts == 1


def test_a_liar_that_does_not_answer_audits_is_found_in_the_ring(
    bundles: Path, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "run", silent_of("b-1", refuses=True))
    with deployed(bundles / "scored", servers, other_numbers, True, audit_share=1.0) as client:
        sweep_until_one_is_named(client, 200)
        assert set(reasons(client)) == {"b-1"}


def test_an_audit_whose_replica_freezes_harms_nobody(
    bundles: Path, servers: Any, references: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers keep-warm messages, but no question; as a replica it ends the audit, as a host it is answered for."""
    monkeypatch.setattr(Host, "run", silent_of("b-1"))
    with deployed(bundles / "scored", servers, None, True, audit_share=1.0, hop_timeout_s=2.0) as client:
        for _ in range(2):
            assert client.generate(PROMPT, seed=4, **MODES[0], timeout_s=60).output == references[0]
        assert reasons(client) == {}
        assert client.status().audits.audited >= 2


def test_two_that_disagree_need_a_third_opinion(bundles: Path, servers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with deployed(bundles / "scored", servers, other_numbers, True, audit_share=1.0, weights=None) as client:
        for seed in range(6):
            client.generate(PROMPT, seed=seed, mode="sweep", max_bytes=8)
        assert reasons(client) == {}
    assert "nobody can tell which of them is wrong: start the router with --checkpoint" in caplog.text


def test_a_stream_that_was_lied_to_ends_with_an_error_or_the_truth(
    bundles: Path, servers: Any, references: list[bytes]
) -> None:
    """Most of its pieces are handed out before an audit looks."""
    with deployed(bundles / "scored", servers, other_numbers, True, audit_share=0.3) as client:
        refused = []
        for _ in range(20):
            try:
                list(client.stream(PROMPT, seed=4, **MODES[1]))
            except RouterError as error:
                refused.append(str(error))
            if reasons(client):
                break
        assert all("the text so far was wrong: send the request again" in each for each in refused)
        assert client.generate(PROMPT, seed=4, **MODES[1]).output == references[1]


def test_the_share_of_sweeps_that_is_audited() -> None:
    auditor = Auditor(Ring(()), 0.05, None, seed=1)
    assert 30 < sum(auditor.picks() for _ in range(1000)) < 70
    assert auditor.counters.sweeps == 1000


# What counts as a difference


def hop(matrix: np.ndarray[Any, Any], codec: str) -> stage_pb2.Hop:
    hidden = hidden_codec(codec).encode(torch.from_numpy(matrix.astype(np.float32)))
    return stage_pb2.Hop(decode=stage_pb2.Decode(clean=b"ab", codec=codec, stage=1, hidden=hidden))


@pytest.mark.parametrize("codec", HIDDEN)
def test_rounding_is_no_lie_and_more_is(codec: str) -> None:
    matrix = np.random.default_rng(0).normal(size=(2, 16))
    noise = np.random.default_rng(1).uniform(-1, 1, size=(2, 16))
    assert agree(hop(matrix, codec), hop(matrix + 1e-4 * noise, codec))
    step = np.abs(matrix).max() / Int8.levels
    assert not agree(hop(matrix, codec), hop(matrix + 4 * step * np.sign(noise), codec))
    assert not agree(hop(matrix, codec), hop(matrix[:, :8], codec))


def test_outliers_of_a_row_hide_no_lie_about_the_rest() -> None:
    """Their scale is not that of the rest, so neither is what may be rounding."""
    matrix = np.random.default_rng(0).normal(size=(2, 16))
    matrix[:, 3] = 1000 / 8
    lie = matrix + 0.3 * np.sign(matrix) * (np.arange(16) != 3)
    assert agree(hop(matrix, "int8"), hop(matrix + 1e-4, "int8"))
    assert not agree(hop(matrix, "int8"), hop(lie, "int8"))


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"clean": b"xb"}},
        {"decode": {"remaining": 7}},
        {"decode": {"sampling": stage_pb2.Sampling(seed=9)}},
        {"decode": {"codec": "unheard-of"}},
        {"verify": {"clean": b"ab", "draft": 1}},
        {"score": {"clean": b"ab", "candidates": [b"x"]}},
    ],
)
def test_all_that_the_next_host_is_told_must_be_the_same(change: dict[str, Any]) -> None:
    matrix = np.random.default_rng(0).normal(size=(2, 16))
    mine, theirs = hop(matrix, "int8"), hop(matrix, "int8")
    theirs.session = "another"
    theirs.timings.add(host="another")
    assert agree(mine, theirs)
    theirs.MergeFrom(stage_pb2.Hop(**change))
    assert not agree(mine, theirs)


def test_a_codec_that_nobody_knows_is_near_nothing() -> None:
    one, other = (hop(np.full((2, 16), x), "int8") for x in (1.0, 2.0))
    work_of(one).codec = work_of(other).codec = "unheard-of"
    assert not agree(one, other)


def test_texts_must_be_the_same() -> None:
    one, other = stage_pb2.Event(text=b"abc"), stage_pb2.Event(text=b"abd")
    assert agree(one, one)
    assert not agree(one, other)
    assert not agree(one, stage_pb2.Hop())
    scores = [stage_pb2.Event(scores=stage_pb2.Scores(nats=np.float64([-1, x]).tobytes())) for x in (-2, -2.0001, -3)]
    assert agree(scores[0], scores[1])
    assert not agree(scores[0], scores[2])


class Answering(Relay):
    """A host that answers every hop with one outcome."""

    outcome: stage_pb2.Event

    async def run(self, hop: stage_pb2.Hop) -> stage_pb2.Event:
        return self.outcome


def test_no_host_escapes_by_what_it_says_of_its_device() -> None:
    async def replicas() -> list[str]:
        ring, weights = Ring(()), ("c",)
        for name, backend in (("a", "torch"), ("b", "torch on cuda (NVIDIA H100)"), ("c", "torch")):
            link = HostLink(HostEntry(name, f"127.0.0.1:{ord(name)}", (0,), "x"), "router", 1.0)
            link.info, link.held, link.problem = stage_pb2.DescribeResponse(backend=backend), {weights: None}, ""
            ring.links.append(link)
        found = [other.entry.name for other in ring.auditor._replicas(ring.links[0], weights)]
        found += [other.entry.name for other in ring.auditor._replicas(ring.links[1], weights)]
        await ring.close()
        return found

    assert asyncio.run(replicas()) == ["b", "c", "a", "c"]


@pytest.mark.parametrize("compute_ms", [float("nan"), -1.0, float("inf")])
def test_an_impossible_measurement_of_a_replica_is_not_added_up(compute_ms: float) -> None:
    async def ask() -> Auditor:
        ring = Ring(())
        link = HostLink(HostEntry("a", "127.0.0.1:1", (0,), "a"), "router", 1.0)
        link.relay = relay = Answering("127.0.0.1:1", 1, 1.0, "a")
        relay.outcome = stage_pb2.Event(timings=[stage_pb2.HopTiming(host="a", compute_ms=compute_ms)])
        with pytest.raises(StatusError):
            await ring.auditor._ask(link, [stage_pb2.Hop()])
        await ring.close()
        return ring.auditor

    assert asyncio.run(ask()).counters == AuditCounters()
