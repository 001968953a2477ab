"""Leases, orders, and watching a run."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, until
from tests.trainer.rounds.network.calls import Start
from trainer.rounds.client import LeaseLostError
from trainer.rounds.store import Update
from trainer.v1 import rounds_pb2


def test_a_lease_of_another_process_is_refused(network: Start) -> None:
    net = network()
    net.join()
    for worker, message in ("foot", "foot does not hold this lease"), ("hand", "another process already works as hand"):
        with pytest.raises(LeaseLostError, match=message):
            net.link().next(rounds_pb2.NextRequest(worker=worker, lease="other"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_older_of_two_processes_of_one_name_stands_by(network: Start, caplog: pytest.LogCaptureFixture) -> None:
    net = network(replicas=1, model="ar")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(net.work, "w0", pace_s=2.0)
        until(lambda: len(list(net.coordinator.members)), 250)
        twin = net.join("w0")  # within the 12 s that the older one needs for all of its steps
        until(lambda: "token if required; retrying" in caplog.text, 250)
        net.stub.Leave(rounds_pb2.LeaveRequest(worker="w0", lease=twin.lease), timeout=PATIENCE_S)
        assert job.result(250) == 3


@pytest.mark.slow
def test_a_part_whose_worker_is_gone_is_reassigned(network: Start) -> None:
    net = network(coordinator={"lease_s": 0.5}, replicas=1, rounds=1)
    net.join("silent", part=0)
    assert net.work("w0", part=0, wait=True) == 1
    assert net.work("w1", part=1) == 1
    until(lambda: net.coordinator.schedule.ended)


def test_an_order_is_for_the_round_open_when_it_is_made(network: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(replicas=1)
    place, make = net.join(part=0), net.coordinator._fill_order

    def made_late(*args: Any) -> Any:
        if not net.ledger.round("block-0"):
            net.ledger.accept(Update("u", "other", "block-0", 0, 0, 2, 4, net.delta("block-0")), 0.0)
            net.ledger.close("block-0", 0.0)
        return make(*args)

    monkeypatch.setattr(net.coordinator, "_fill_order", made_late)
    order = net.stub.Next(rounds_pb2.NextRequest(worker="hand", lease=place.lease), timeout=PATIENCE_S).order
    assert (order.round, order.base.version, net.ledger._parts["block-0"].start_versions["block-0"]) == (1, 1, 1)


def test_watching_shows_parts_and_workers(network: Start) -> None:
    net = network()
    place = net.join(part=1)
    beat = rounds_pb2.BeatRequest(worker="hand", lease=place.lease, doing=rounds_pb2.DOING_TRAINING, steps=1)
    beat.losses["denoise_nats"] = 2.5
    assert net.stub.Beat(beat, timeout=PATIENCE_S).open_round == 0
    link = net.link()
    update = next(link.watch(1.0))
    assert [(p.name, p.round, p.present, p.replicas) for p in update.parts] == [
        ("block-0", 0, 0, 2),
        ("block-1", 0, 1, 2),
    ]
    (worker,) = update.workers
    assert (worker.worker, worker.part, worker.doing) == ("hand", 1, rounds_pb2.DOING_TRAINING)
    assert dict(worker.losses) == {"denoise_nats": 2.5}
    assert not worker.gone
    payload = net.payload("block-1")
    submission = net.submission(place, payload, losses={"denoise_nats": 2.25})
    assert link.submit(submission, payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    other = net.join("other", part=1)
    payload = net.payload("block-1", net.delta("block-1", 0.02))
    link.submit(net.submission(other, payload, "other", losses={"denoise_nats": 2.75}), payload)
    assert next(update.parts[1].round for update in link.watch(0.05) if update.parts[1].round) == 1
