"""Features over real calls: the weights of one process, a worker that continues, a coordinator that is not held up."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onesweep.stages.errors import ConfigError, Interrupted, ServiceError
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.planning.inventory import take_inventory
from onesweep.trainer.planning.traffic import traffic_of
from onesweep.trainer.rounds.audit import audit
from onesweep.trainer.rounds.cache import FeatureClient
from onesweep.trainer.rounds.client import RoundsClient
from onesweep.trainer.rounds.features import FeatureReader
from onesweep.trainer.rounds.server import STORE
from onesweep.trainer.rounds.settings import SimulatedWorkers, Throttle
from onesweep.trainer.rounds.simulation import Simulation
from onesweep.trainer.rounds.spec import RunSpec
from onesweep.trainer.v1 import rounds_pb2
from tests.conftest import until
from tests.trainer.rounds.network.calls import Start
from tests.trainer.small import corpus, rounds_config

# Two blocks with a worker each, three rounds of two steps.
chained = replace(
    rounds_config,
    architecture=replace(rounds_config.architecture, context="chained"),
    rounds=replace(rounds_config.rounds, replicas=1, context_by="features"),
)


def expect_weights_of_one_process(net: Any, corpus: Corpus) -> None:
    engine = Simulation(net.spec, corpus, SimulatedWorkers())
    engine.run()
    for part, expected in engine.published().items():
        assert all(torch.equal(net.ledger.weights(part)[name], tensor) for name, tensor in expected.items())
    assert audit(net.out / "rounds").problems == []


def test_two_blocks_make_the_weights_of_one_process(network: Start) -> None:
    net = network(chained, together=True)
    assert net.work_together(0, 1) == [3, 3]
    until(lambda: net.over, 60)
    expect_weights_of_one_process(net, corpus)
    planned = [traffic_of(part, net.spec.config.rounds) for part in take_inventory(net.spec.config)]
    assert net.coordinator.sent_bytes == sum(each.down_in_all for each in planned)


class StopAfter(Throttle):
    """Asks a worker to stop after so many steps."""

    def __init__(self, stop: threading.Event, steps: int) -> None:
        super().__init__()
        self.stop, self.last = stop, steps

    @contextmanager
    def step(self, replica: int) -> Iterator[None]:
        with super().step(replica):
            yield
        if self.steps == self.last:
            self.stop.set()


def test_who_is_stopped_in_a_round_goes_on_with_the_same_features(network: Start) -> None:
    net = network(chained, together=True)
    first, second = StopAfter(net.stop, 3), Throttle()
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(net.work, f"w{part}", part=part, **more) for part, more in ((0, {}), (1, {"throttle": first}))
        ]
        for job in jobs:
            with pytest.raises(Interrupted):
                job.result(60)
    net.stop.clear()
    fetched = net.coordinator.sent_bytes
    before = sorted(path.name for path in (net.out.parent / "state-w1" / "features").iterdir())
    assert before == ["1-0-1"]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(net.work, f"w{part}", part=part, **more) for part, more in ((0, {}), (1, {"throttle": second}))
        ]
        for job in jobs:
            job.result(60)
    assert (first.steps, second.steps) == (3, 3), "three rounds of two steps, and none twice"
    until(lambda: net.over, 60)
    expect_weights_of_one_process(net, corpus)
    form = take_inventory(net.spec.config)[1].features
    assert form is not None
    weights = sum(part.weight_bytes for part in take_inventory(net.spec.config))
    assert net.coordinator.sent_bytes - fetched <= form.size + 2 * weights, "those of one round, and no more"


class HeldReader(FeatureReader):
    """Makes features once it is let go."""

    go = threading.Event()

    def payload(self, index: int, seed: int, step: int) -> bytes:
        assert self.go.wait(60)
        return super().payload(index, seed, step)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    HeldReader.go.clear()
    yield HeldReader.go
    HeldReader.go.set()


def test_nobody_waits_while_features_are_made(network: Start, held: threading.Event) -> None:
    net = network(chained, reader=HeldReader)
    place, other = net.join("hand", part=1), net.join("other", part=0)
    asked = rounds_pb2.NextRequest(worker="hand", lease=place.lease, wait_seconds=0.1)
    assert net.stub.Next(asked, timeout=30).HasField("pause")
    first = rounds_pb2.NextRequest(worker="other", lease=other.lease, wait_seconds=0.1)
    assert net.stub.Next(first, timeout=30).order.steps == 2
    payload = net.payload("block-0")
    link = net.link()
    assert link.submit(net.submission(other, payload, "other"), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    asked.wait_seconds = 30
    held.set()
    order = net.stub.Next(asked, timeout=60).order
    assert order.features.name == "features-1-0-0"
    fetch = rounds_pb2.FetchRequest(worker="hand", lease=place.lease, name=order.features.name, offset=100)
    (piece,) = net.stub.Fetch(fetch, timeout=30)
    assert len(piece.data) == order.features.size - 100
    again = net.stub.Next(asked, timeout=30).order
    assert again.features == order.features, "a round's are made once"


def test_what_a_coordinator_made_is_there_when_it_begins_anew(network: Start, held: threading.Event) -> None:
    net = network(chained, reader=HeldReader)
    held.set()
    asked = rounds_pb2.NextRequest(worker="hand", lease=net.join(part=1).lease, wait_seconds=30)
    made = net.stub.Next(asked, timeout=60).order.features
    net.end()
    held.clear()
    net = network(chained, reader=HeldReader)
    asked.lease = net.join(part=1).lease
    assert net.stub.Next(asked, timeout=60).order.features == made


def test_a_disk_that_takes_nothing_is_told_and_tried_again(network: Start) -> None:
    net = network(chained)
    in_the_way = net.out / STORE / "features"
    in_the_way.write_text("")
    asked = rounds_pb2.NextRequest(worker="hand", lease=net.join(part=1).lease, wait_seconds=30)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(net.stub.Next, asked, timeout=60)
        until(lambda: net.coordinator.features.problem, 30)
        link = net.link()
        assert "File exists" in next(link.watch(1.0)).problem
        in_the_way.unlink()
        assert job.result(60).order.features.size > 0
    assert net.coordinator.features.problem == ""


def test_other_text_gets_no_features(network: Start) -> None:
    with pytest.raises(ConfigError, match="features that workers get are of the coordinator's text: leave --own-data"):
        network(chained, coordinator={"own_data": True})


def test_features_that_are_not_those_of_a_round_are_not_trained_on(tmp_path: Path) -> None:
    spec = RunSpec.of(chained, corpus)
    client, place = RoundsClient("127.0.0.1:1"), rounds_pb2.JoinResponse(part=1)
    features = FeatureClient(client, "w1", place, tmp_path, spec.task(1, corpus, 0), spec.config)
    with pytest.raises(ServiceError, match="does not send what is read in a round: it is damaged"):
        features.take(rounds_pb2.Order())
    damaged = rounds_pb2.File(name="features-1-0-0", size=5, sha256=bytes(32))
    with pytest.raises(ServiceError, match="has 5 bytes of features for a round, not"):
        features.take(rounds_pb2.Order(features=damaged))
    client.close()
