"""Candidates in batches at the router: what a session makes of their results, and of a host that is lost between."""

from collections.abc import Callable

import numpy as np
import pytest

from serving.modes.resample import read_scores
from stages.model import scoring
from stages.v1 import stage_pb2
from tests.serving.router.test_session import Answer, tried
from tests.stages.hops import step

COUNT, LENGTH = 10, 6
CANDIDATES = [bytes([65 + i] * LENGTH) for i in range(COUNT)]
WORK = step(number=0, clean=b"The sea ", codec="fp32", candidates=CANDIDATES)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BATCH_ROWS", 3 * LENGTH)


def scores_of(hop: stage_pb2.Hop) -> stage_pb2.Event:
    """As a host gives them: here each candidate's first letter."""
    nats = np.array([-float(each[0]) for each in hop.read.score.candidates], "<f8").tobytes()
    scores = stage_pb2.Scores(nats=nats, batch=hop.read.score.batch)
    return stage_pb2.Event(session=hop.session, number=hop.read.number, scores=scores)


def scored_by(answer: Answer) -> tuple[stage_pb2.Event, list[list[int]], int]:
    """`tried` of WORK, with the batches that each try sent."""
    event, tries, replays = tried(WORK, answer, lambda event: read_scores(event.scores.nats, COUNT))
    return event, [[work.score.batch for work in sent] for sent in tries], replays


@pytest.mark.parametrize("times", [1, 2])
def test_results_of_all_batches_are_joined_and_count_once(times: int) -> None:
    event, tries, replays = scored_by(lambda hop, _: [scores_of(hop)] * times)
    assert np.frombuffer(event.scores.nats, "<f8").tolist() == [-65.0 - i for i in range(COUNT)]
    assert (tries, replays) == ([[0, 1, 2, 3]], 0)


def faulty(hop: stage_pb2.Hop) -> stage_pb2.Event:
    return stage_pb2.Event(session=hop.session, fault=stage_pb2.Fault(code=14, message="gone"))


def of_other_batch(hop: stage_pb2.Hop) -> stage_pb2.Event:
    event = scores_of(hop)
    event.scores.batch += 1
    return event


def short(hop: stage_pb2.Hop) -> stage_pb2.Event:
    event = scores_of(hop)
    event.scores.nats = event.scores.nats[:-8]
    return event


def text(hop: stage_pb2.Hop) -> stage_pb2.Event:
    return stage_pb2.Event(session=hop.session, number=hop.read.number, text=b"a")


@pytest.mark.parametrize("wrong", [faulty, of_other_batch, short, text])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_an_attempt_that_fails_at_any_batch_restarts_at_the_first(
    wrong: Callable[[stage_pb2.Hop], stage_pb2.Event], batch: int
) -> None:
    event, tries, replays = scored_by(
        lambda hop, number: [wrong(hop) if number == 0 and hop.read.score.batch == batch else scores_of(hop)]
    )
    assert len(event.scores.nats) == 8 * COUNT
    assert (tries, replays) == ([[0, 1, 2, 3]] * 2, 1)


def test_endless_results_are_a_fault() -> None:
    _, tries, replays = scored_by(lambda hop, number: [scores_of(hop)] * (1 if number else 400))
    assert (len(tries), replays) == (2, 1)
