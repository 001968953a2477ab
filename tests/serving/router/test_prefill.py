"""Long prompts that travel in pieces: the text, the account, and what becomes of it when a host is lost under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import Client
from onesweep.stages.host.host import Host
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import AnyWork, Work, work_of
from onesweep.stages.wire.status import StatusError
from tests.serving.pretrained import ids, text_of, write_model, written
from tests.serving.router.test_replicas import doubled
from tests.serving.router.test_session import RecordingRing, opened
from tests.stages.hops import step

PROMPT = b"The sea was calm, and the ship lay still. " * 8
REQUESTS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar", "max_bytes": 6},
    "ar int8": {"mode": "ar", "max_bytes": 6, "codec": "int8"},
    "ar-speculative": {"mode": "ar-speculative", "max_bytes": 12, "draft": 4},
    "resample": {"mode": "resample", "max_bytes": 12, "chunk": 6, "candidates": 8},
    "verified": {"mode": "verified", "max_bytes": 12},
    "infill": {"mode": "infill", "max_bytes": 12, "chunk": 6, "suffix": b" and so on"},
}


@pytest.fixture(scope="module")
def rings(bundles: Path, local_ring: Any) -> Iterator[tuple[Client, Client]]:
    """One that sends prompts in pieces, and one that does not."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(local_ring(bundles / "scored", 3, ring={"pieces": pieces})) for pieces in (16, 1)
        )


@pytest.mark.parametrize("name", list(REQUESTS))
def test_the_text_and_what_it_takes_are_the_same(rings: tuple[Client, Client], name: str) -> None:
    cut, whole = (ring.generate(PROMPT, seed=5, **REQUESTS[name]) for ring in rings)
    assert cut.output == whole.output
    assert (cut.sweeps, cut.hops, cut.replays) == (whole.sweeps, whole.hops, 0)
    assert [host.name for host in cut.hosts] == [host.name for host in whole.hosts]
    # three hops instead of one, each with an envelope of its own
    for one, several in zip(whole.wire_bytes, cut.wire_bytes, strict=True):
        assert one * 0.99 < several < one + 2000


def test_tokens_travel_in_pieces(tmp_path: Path, local_ring: Any) -> None:
    stages, prompt = write_model(tmp_path), "the sea and a ship " * 60
    tokens = ids(prompt)
    assert len(tokens) > 256
    with local_ring(tmp_path, 3) as client:
        result = client.generate(prompt, mode="ar", max_tokens=6, temperature=0.0)
    assert result.text == text_of(written(stages, tokens, 6))


# When something happens under way


class Watched:
    """Hosts of a ring whose `accept` is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, bool]] = []
        self.before: Callable[[Host, stage_pb2.Hop], None] = lambda host, hop: None
        accept = Host.accept

        def looked_at(host: Host, hop: stage_pb2.Hop, received_bytes: int) -> Any:
            self.before(host, hop)
            self.seen.append((host.settings.name, work_of(hop).start, hop.HasField("prefill")))
            return accept(host, hop, received_bytes)

        monkeypatch.setattr(Host, "accept", looked_at)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture(scope="module")
def pairs(bundles: Path, module_servers: Any, wait_ready: Any) -> Iterator[tuple[Client, Client]]:
    """Routers over two hosts for every block, the second of which audits every sweep."""
    bundle = bundles / "scored"
    topology = doubled(bundle)
    other = replace(topology, router=f"127.0.0.1:{free_port_block(1)}")
    module_servers.hosts(topology, bundle)
    module_servers.router(topology, bundle, ring={"hop_timeout_s": 10.0})
    module_servers.router(other, bundle, ring={"hop_timeout_s": 10.0, "audit_share": 1.0})
    for each in (topology, other):
        wait_ready(each.router)
    with Client(topology.router) as plain, Client(other.router) as audited:
        yield plain, audited


GONE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("name", "code"), [("ar", GONE), ("resample", GONE), ("ar", FULL)])
def test_a_host_lost_or_full_between_two_pieces(
    pairs: tuple[Client, Client], watched: Watched, rings: tuple[Client, Client], name: str, code: grpc.StatusCode
) -> None:
    lost = set[str]()

    def dies(host: Host, hop: stage_pb2.Hop) -> None:
        own = host.settings.name
        if own in lost or (work_of(hop).start == 128 and own.startswith("b") and not lost):
            lost.add(own)
            raise StatusError(code, "gone", 100)

    watched.before = dies
    result = pairs[0].generate(PROMPT, seed=5, **REQUESTS[name])
    assert result.output == rings[1].generate(PROMPT, seed=5, **REQUESTS[name]).output
    assert result.replays == 1
    (first,) = lost
    other = {"b-1": "b-2", "b-2": "b-1"}[first]
    assert (first, 0, True) in watched.seen
    assert [(start, more) for host, start, more in watched.seen if host == other][:3] == [
        *[(0, True), (128, True)],
        (256, False),
    ], "the other host gets all pieces"


def test_audits_take_an_opening_in_pieces(pairs: tuple[Client, Client], rings: tuple[Client, Client]) -> None:
    for name in ("ar", "resample"):
        expected = rings[1].generate(PROMPT, seed=5, **REQUESTS[name]).output
        assert pairs[1].generate(PROMPT, seed=5, **REQUESTS[name]).output == expected
    audits = pairs[1].status().audits
    assert (audits.faulty_hosts, audits.audited) == (0, audits.sweeps)
    assert audits.hops >= 4 * 3 * audits.audited, "four hosts, three pieces"
    assert audits.compute_ms > 0


# What a router sends


def sent_by(work: Work, fails: int, pieces: int = 16) -> list[list[AnyWork]]:
    """Steps that a session sends for `work`, try by try, of which the first ones fail under way."""

    async def ask() -> list[list[AnyWork]]:
        tries, ring = dict[str, list[AnyWork]](), RecordingRing(pieces=pieces)

        def answer(hop: stage_pb2.Hop) -> None:
            tries.setdefault(hop.session, []).append(work_of(hop))
            event = stage_pb2.Event(session=hop.session, number=work.number, text=b"b")
            if len(tries) <= fails:  # each that was under way
                event = stage_pb2.Event(session=hop.session, fault=stage_pb2.Fault(code=14, message="no"))
            elif work_of(hop).start + len(work_of(hop).clean) < len(work.clean):
                return
            ring._deliver(event)

        ring.path[0].relay.answer = answer
        session = opened(ring, capacity=500)
        await session.push(work)
        await session.event()
        return list(tries.values())

    return asyncio.run(asyncio.wait_for(ask(), 30))


def test_all_pieces_leave_at_once_and_go_again_together() -> None:
    work = step(number=0, clean=PROMPT, remaining=1, codec="fp32")
    first, second = sent_by(work, fails=1)
    assert [step.start for step in first] == [0, 128, 256]
    assert {step.number for step in first} == {0}
    assert first == second
    assert sent_by(work, fails=0, pieces=1) == [[work]]
