"""Long prompts that travel in chunks: the text, the account, and the loss of a host under way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.client.client import Client
from serving.modes.resample import ResampleMode
from stages.v1 import stage_pb2
from stages.wire.messages import AnyWork, Work, work_of
from tests.conftest import until
from tests.serving.router.conftest import Loss
from tests.serving.router.test_session import tried
from tests.stages.hops import step

PROMPT = b"The sea was calm, and the ship lay still. " * 8
REQUESTS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar", "max_bytes": 6},
    "ar int8": {"mode": "ar", "max_bytes": 6, "codec": "int8"},
    "ar-speculative": {"mode": "ar-speculative", "max_bytes": 12, "draft": 4},
    "resample": {"mode": "resample", "max_bytes": 12, "chunk": 6, "candidates": 8},
    "resample there": {"mode": "resample", "max_bytes": 12, "chunk": 5, "candidates": 8, "scorer": "ar"},
}


@pytest.fixture(autouse=True)
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last host writes the candidates, as of an imported model."""
    if "there" in request.node.name:
        monkeypatch.setattr(ResampleMode, "is_near", False)


@pytest.fixture(scope="module")
def ring(bundles: Path, local_ring: Any) -> Iterator[Client]:
    with local_ring(bundles / "scored", 3, {"prefix_mb": 0}) as client:
        yield client


@pytest.fixture
def in_one_piece(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("stages.wire.messages.MAX_PREFILL_CHUNKS", 1)


@pytest.mark.parametrize("name", list(REQUESTS))
def test_a_prompt_in_chunks_gives_the_same_text_and_account(ring: Client, in_one_piece: Any, name: str) -> None:
    cut = ring.generate(PROMPT, seed=5, **REQUESTS[name])
    in_one_piece()
    whole = ring.generate(PROMPT, seed=5, **REQUESTS[name])
    assert cut.output == whole.output
    assert (cut.sweeps, cut.hops) == (whole.sweeps, whole.hops)
    assert [host.name for host in cut.hosts] == [host.name for host in whole.hosts]
    # three hops instead of one, each with an envelope of its own
    for one, several in zip(whole.wire_bytes, cut.wire_bytes, strict=True):
        assert one * 0.99 < several < one + 2000


# When something happens under way


GONE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("name", "code"), [("ar", GONE), ("resample", GONE), ("resample there", GONE), ("ar", FULL)])
def test_a_host_lost_or_full_between_chunks_is_replaced(
    pairs: tuple[Client, Client],
    lose: Callable[..., Loss],
    ring: Client,
    name: str,
    code: grpc.StatusCode,
) -> None:
    prompt = code.name.encode() + PROMPT[len(code.name) :]  # its own: no host has the beginning in its cache
    loss = lose("b", lambda hop: work_of(hop).start == 128, code)
    result = pairs[0].generate(prompt, seed=5, **REQUESTS[name])
    assert result.output == ring.generate(prompt, seed=5, **REQUESTS[name]).output
    assert result.replays >= 1
    before, instead = (
        [[(work_of(hop).start, hop.read.WhichOneof("ask") is None) for hop in hops[:3]] for hops in tries]
        for tries in (loss.before, loss.instead)
    )
    assert [(0, True)] in before
    assert [(0, True), (128, True), (256, False)] in instead, "the other host gets all pieces"


@pytest.mark.parametrize("name", ["resample there"])
@pytest.mark.parametrize("pair", ["a", "b"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_hosts_that_write_candidates_are_replaced_and_audited(
    pairs: tuple[Client, Client], lose: Callable[..., Loss], ring: Client, number: int, pair: str, name: str
) -> None:
    """Another host reads and writes the same to the last bit."""
    prompt, request = f"{pair}{number}".encode() + PROMPT, REQUESTS[name]
    loss = lose(pair, lambda hop: work_of(hop).number == number)
    result = pairs[0].generate(prompt, seed=5, **request)
    assert loss.lost
    expected = ring.generate(prompt, seed=5, **request)
    assert result.output == expected.output
    assert (result.sweeps, expected.sweeps) == (5, 4), "the prompt, three chunks, and the known text once more"
    loss.lost = "none"
    audited = pairs[1].status().audits.audited
    assert pairs[1].generate(prompt, seed=5, **request).output == expected.output
    until(lambda: pairs[1].status().audits.audited > audited)
    assert not pairs[1].status().audits.faulty_hosts


# Hops of a router


def sent_by(work: Work, fails: int) -> list[list[AnyWork]]:
    """The hops that a session sends for `work`, attempt by attempt; the first `fails` fail under way."""

    def answer(hop: stage_pb2.Hop, number: int) -> list[stage_pb2.Event]:
        if number < fails:  # each that was under way
            return [stage_pb2.Event(session=hop.session, fault=stage_pb2.Fault(code=14, message="no"))]
        is_last = work_of(hop).start + len(work_of(hop).clean) == len(work.clean)
        return [stage_pb2.Event(session=hop.session, number=work.number, text=b"b")] * is_last

    return tried(work, answer)[1]


def test_all_chunks_are_sent_at_once_and_resent_together(in_one_piece: Any) -> None:
    work = step(number=0, clean=PROMPT, remaining=1, codec="fp32")
    first, second = sent_by(work, fails=1)
    assert [step.start for step in first] == [0, 128, 256]
    assert {step.number for step in first} == {0}
    assert first == second
    in_one_piece()
    assert sent_by(work, fails=0) == [[work]]
