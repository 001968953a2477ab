"""Features over real calls: the weights of one process, a worker that goes on, a coordinator that is not held up."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.errors import ConfigError, Interrupted, ServiceError
from tests.trainer.rounds.network.calls import Start
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.planning.inventory import take_inventory
from trainer.planning.traffic import traffic_of
from trainer.rounds.audit import audit
from trainer.rounds.feature_reader import FeatureReader
from trainer.rounds.fleet import Fleet
from trainer.rounds.inprocess import Engine
from trainer.rounds.learner import Learner
from trainer.rounds.store import MemoryStore
from trainer.v1 import rounds_pb2


@pytest.fixture
def chained(rounds_config: TrainingConfig) -> TrainingConfig:
    """Two blocks with a worker each, three rounds of two steps."""
    rounds = replace(rounds_config.rounds, replicas=1, context_by="features")
    return replace(rounds_config, architecture=replace(rounds_config.architecture, context="chained"), rounds=rounds)


class Gate:
    """Makes blocks keep step, as they do in one process: round r of block 1 is ordered at version r of block 0."""

    def __init__(self, net: Any) -> None:
        self.net, self.next, self.judge = net, net.coordinator.next, net.coordinator.judge
        self.ordered = -1

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self.net.stop.is_set():
            await asyncio.sleep(0.01)

    async def keep_next(self, request: Any, waiting: Any) -> Any:
        member = self.net.coordinator.called(request.worker, request.lease)
        if member.place.part == 1:
            wanted = min(request.after + 1 if request.HasField("after") else 0, self.net.plan.rounds)
            await self.until(lambda: self.net.ledger.round("block-0") >= wanted)
        answer = await self.next(request, waiting)
        if member.place.part == 1 and answer.HasField("order"):
            self.ordered = answer.order.round
        return answer

    async def keep_judge(self, submission: Any, payload: bytes) -> Any:
        if self.net.coordinator.called(submission.worker, submission.lease).place.part == 0:
            await self.until(lambda: self.ordered >= submission.round)
        return await self.judge(submission, payload)


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def keep(net: Any) -> None:
        gate = Gate(net)
        monkeypatch.setattr(net.coordinator, "next", gate.keep_next)
        monkeypatch.setattr(net.coordinator, "judge", gate.keep_judge)

    return keep


def expect_weights_of_one_process(net: Any, corpus: Corpus) -> None:
    engine = Engine(net.plan.frame, corpus, MemoryStore(), Fleet())
    engine.run()
    for part, expected in engine.published().items():
        assert all(torch.equal(net.ledger.weights(part)[name], tensor) for name, tensor in expected.items())
    assert audit(net.out / "rounds").problems == []


def test_two_blocks_make_the_weights_of_one_process(
    network: Start, chained: TrainingConfig, corpus: Corpus, until: Callable[..., Any], in_step: Any
) -> None:
    net = network(chained)
    in_step(net)
    assert net.work_together(0, 1) == [3, 3]
    until(lambda: net.over, 60)
    expect_weights_of_one_process(net, corpus)
    planned = [traffic_of(part, net.plan.config.rounds) for part in take_inventory(net.plan.config)]
    assert net.coordinator.sent_bytes == sum(each.down_in_all for each in planned)


def test_who_is_stopped_in_a_round_goes_on_with_the_same_features(
    network: Start,
    chained: TrainingConfig,
    corpus: Corpus,
    until: Callable[..., Any],
    in_step: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, steps, train = network(chained), list[int](), Learner.train
    in_step(net)

    def stopped(learner: Learner, first: int, count: int) -> dict[str, float]:
        record = train(learner, first, count)
        if learner.part.name == "block-1":
            steps.append(first)
            if first == 2:
                net.stop.set()
        return record

    monkeypatch.setattr(Learner, "train", stopped)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(net.work, f"w{part}", part=part) for part in (0, 1)]
        for job in jobs:
            with pytest.raises(Interrupted):
                job.result(60)
    net.stop.clear()
    fetched = net.coordinator.sent_bytes
    before = sorted(path.name for path in (net.out.parent / "state-w1" / "features").iterdir())
    assert before == ["1-0-1"]
    net.work_together(0, 1)
    assert steps == [0, 1, 2, 3, 4, 5]
    until(lambda: net.over, 60)
    expect_weights_of_one_process(net, corpus)
    form = take_inventory(net.plan.config)[1].features
    assert form is not None
    weights = sum(part.weight_bytes for part in take_inventory(net.plan.config))
    assert net.coordinator.sent_bytes - fetched <= form.size + 2 * weights, "those of one round, and no more"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Features are made once this is set."""
    event, real = threading.Event(), FeatureReader.payload

    def payload(reader: FeatureReader, index: int, seed: int, step: int) -> bytes:
        assert event.wait(60)
        return real(reader, index, seed, step)

    monkeypatch.setattr(FeatureReader, "payload", payload)
    yield event
    event.set()


def test_nobody_waits_while_features_are_made(network: Start, chained: TrainingConfig, held: threading.Event) -> None:
    net = network(chained)
    place, other = net.join("hand", part=1), net.join("other", part=0)
    asked = rounds_pb2.NextRequest(worker="hand", lease=place.lease, wait_seconds=0.1)
    assert net.stub.Next(asked, timeout=30).HasField("pause")
    first = rounds_pb2.NextRequest(worker="other", lease=other.lease, wait_seconds=0.1)
    assert net.stub.Next(first, timeout=30).order.steps == 2
    payload = net.payload("block-0")
    link = net.link()
    assert link.submit(net.submission(other, payload, "other"), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    link.close()
    asked.wait_seconds = 30
    held.set()
    order = net.stub.Next(asked, timeout=60).order
    assert order.features.name == "features-1-0-0"
    fetch = rounds_pb2.FetchRequest(worker="hand", lease=place.lease, name=order.features.name, offset=100)
    (piece,) = net.stub.Fetch(fetch, timeout=30)
    assert len(piece.data) == order.features.size - 100
    again = net.stub.Next(asked, timeout=30).order
    assert again.features == order.features, "a round's are made once"


def test_what_a_coordinator_made_is_there_when_it_begins_anew(
    network: Start, chained: TrainingConfig, held: threading.Event
) -> None:
    net = network(chained)
    held.set()
    asked = rounds_pb2.NextRequest(worker="hand", lease=net.join(part=1).lease, wait_seconds=30)
    made = net.stub.Next(asked, timeout=60).order.features
    net.end()
    held.clear()
    net = network(chained)
    asked.lease = net.join(part=1).lease
    assert net.stub.Next(asked, timeout=60).order.features == made


def test_a_full_disk_is_told_and_tried_again(
    network: Start, chained: TrainingConfig, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    net, real, freed = network(chained), FeatureReader.payload, threading.Event()

    def payload(*arguments: Any) -> bytes:
        if not freed.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(FeatureReader, "payload", payload)
    monkeypatch.setattr("trainer.rounds.feeder.RETRY_S", 0.05)
    asked = rounds_pb2.NextRequest(worker="hand", lease=net.join(part=1).lease, wait_seconds=30)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(net.stub.Next, asked, timeout=60)
        until(lambda: net.coordinator.feeder.problem, 30)
        link = net.link()
        assert "No space left on device" in next(link.watch(1.0)).problem
        link.close()
        freed.set()
        assert job.result(60).order.features.size > 0
    assert net.coordinator.feeder.problem == ""


def test_other_text_gets_no_features(network: Start, chained: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match="features that workers get are of the coordinator's text: leave --own-data"):
        network(chained, coordinator={"own_data": True})


def test_features_that_are_not_those_of_a_round_are_not_trained_on(
    network: Start, chained: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(chained)
    monkeypatch.setattr(net.coordinator.feeder, "file", lambda place, round_: None)
    with pytest.raises(ServiceError, match="does not send what is read in a round: it is damaged"):
        net.work("w1", part=1)
    damaged = rounds_pb2.File(name="features-1-0-0", size=5, sha256=bytes(32))
    monkeypatch.setattr(net.coordinator.feeder, "file", lambda place, round_: damaged)
    with pytest.raises(ServiceError, match="has 5 bytes of features for a round, not"):
        net.work("w1", part=1)
