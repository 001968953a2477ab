"""Leases, orders, files that are fetched, and what those see who watch."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import onesweep.trainer.rounds.client
from onesweep.stages.errors import Interrupted, ServiceError
from onesweep.trainer.rounds.audit import audit
from onesweep.trainer.rounds.client import LeaseLostError
from onesweep.trainer.rounds.settings import Throttle
from onesweep.trainer.rounds.store import Update
from onesweep.trainer.v1 import rounds_pb2
from tests.conftest import until
from tests.trainer.rounds.network.calls import Start, refused, submit


def test_a_lease_that_is_not_ours_is_refused(network: Start) -> None:
    net = network()
    net.join()
    for worker, said in ("foot", "foot has no such lease"), ("hand", "another process works as hand"):
        with pytest.raises(LeaseLostError, match=said):
            net.link().next(rounds_pb2.NextRequest(worker=worker, lease="other"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_two_processes_of_one_name_the_older_stands_by(network: Start, caplog: pytest.LogCaptureFixture) -> None:
    net, throttle = network(replicas=1, model="ar"), Throttle(2.0)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(net.work, "w0", throttle=throttle)
        until(lambda: len(list(net.coordinator.members)), 250)
        twin = net.join("w0")  # within the 12 s that the older one needs for all of its steps
        until(lambda: "where one is asked for; trying again" in caplog.text, 250)
        throttle.pace_s = 0.0
        net.stub.Leave(rounds_pb2.LeaveRequest(worker="w0", lease=twin.lease), timeout=30)
        assert job.result(250) == 3


class Closed(grpc.RpcError):  # a connection that ended in its handshake, as gRPC tells it
    code = staticmethod(lambda: grpc.StatusCode.UNAVAILABLE)
    details = staticmethod(lambda: "failed to connect to all addresses; last error: Socket closed")


def test_a_handshake_that_fails_ends_only_who_was_never_answered(network: Start) -> None:
    link, said = network().link(), "closed the connection: if it speaks TLS"
    with pytest.raises(ServiceError, match=said):
        link._problem(Closed(), ())
    next(link.watch(1.0))
    assert said in link._problem(Closed(), ()), "its coordinator was killed meanwhile"


@pytest.mark.slow
def test_a_part_whose_worker_is_gone_is_given_to_another(network: Start) -> None:
    net = network(coordinator={"lease_s": 0.5}, replicas=1, rounds=1)
    net.join("silent", part=0)
    assert net.work("w0", part=0, wait=True) == 1
    assert net.work("w1", part=1) == 1
    until(lambda: net.coordinator.ended, 30)


@pytest.mark.slow
def test_a_lockstep_round_does_not_wait_for_a_worker_that_is_gone(network: Start) -> None:
    net = network(coordinator={"lease_s": 2.0})
    net.join("silent", part=0)
    place, payload = net.join(part=0), net.payload("block-0")
    assert submit(net, net.submission(place, payload), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    until(lambda: net.ledger.round("block-0") == 1, 60)
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.merged) == ([], 1, 1)


@pytest.mark.slow
def test_the_first_round_begins_with_its_first_order(network: Start) -> None:
    net = network(replicas=1)
    place, payload = net.join(part=0), net.payload("block-0")
    time.sleep(0.2)  # nobody is there to train
    asked = time.monotonic()
    net.stub.Next(rounds_pb2.NextRequest(worker="hand", lease=place.lease), timeout=30)
    assert submit(net, net.submission(place, payload), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    (accepted,) = [record for record in net.ledger.store.records() if record["kind"] == "accepted"]
    assert accepted["after_s"] <= time.monotonic() - asked + 0.001


def test_an_order_is_of_the_round_that_is_open_when_it_is_made(network: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(replicas=1)
    place, make = net.join(part=0), net.coordinator._filled

    def made_late(*args: Any) -> Any:
        if not net.ledger.round("block-0"):
            net.ledger.accept(Update("u", "other", "block-0", 0, 0, 2, 4, net.delta("block-0")), 0.0)
            net.ledger.close("block-0", 0.0)
        return make(*args)

    monkeypatch.setattr(net.coordinator, "_filled", made_late)
    order = net.stub.Next(rounds_pb2.NextRequest(worker="hand", lease=place.lease), timeout=30).order
    assert (order.round, order.base.version) == (1, 1)


def test_who_asks_hears_that_the_question_has_come_before_the_answer(
    network: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who continues at once would hand in only after it has waited."""
    monkeypatch.setattr(onesweep.trainer.rounds.client, "LONG_POLL_S", 60.0)
    net, asked = network(overlap="eager"), threading.Event()
    place, link = net.join(part=0), net.link()
    with ThreadPoolExecutor(1) as pool:
        request = rounds_pb2.NextRequest(worker="hand", lease=place.lease, after=1)
        answer = pool.submit(link.next, request, asked.set)
        assert asked.wait(40)
        assert not answer.done()
        net.stop.set()
        with pytest.raises(Interrupted):
            answer.result()


def test_files_are_fetched_from_an_offset_on(network: Start) -> None:
    net = network()
    place = net.join(part=1)
    wrong = rounds_pb2.NextRequest(worker="hand", lease=place.lease, fragment=1)
    assert refused(lambda: net.stub.Next(wrong, timeout=30)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "there is no fragment 1: parts of this run have 1",
    )
    order = net.stub.Next(rounds_pb2.NextRequest(worker="hand", lease=place.lease), timeout=30).order
    assert (order.round, order.steps, order.base.version, order.base.whole) == (0, 2, 0, True)
    (file,) = order.base.files
    request = rounds_pb2.FetchRequest(worker="hand", lease=place.lease, name=file.name, offset=file.size - 10)
    (piece,) = net.stub.Fetch(request, timeout=30)
    assert piece.data == net.payload("block-1", net.ledger.weights("block-1"))[-10:]
    request.offset = file.size + 1
    assert refused(lambda: net.stub.Fetch(request, timeout=30))[0] is grpc.StatusCode.INVALID_ARGUMENT
    request.name = "../../secret"
    assert refused(lambda: net.stub.Fetch(request, timeout=30))[0] is grpc.StatusCode.NOT_FOUND


def test_who_watches_sees_parts_and_workers(network: Start) -> None:
    net = network()
    place = net.join(part=1)
    beat = rounds_pb2.BeatRequest(worker="hand", lease=place.lease, doing=rounds_pb2.DOING_TRAINING, steps=1)
    beat.losses["denoise_nats"] = 2.5
    assert net.stub.Beat(beat, timeout=30).open_rounds == [0]
    link = net.link()
    update = next(link.watch(1.0))
    assert [(p.name, p.round, p.present, p.replicas) for p in update.parts] == [
        ("block-0", 0, 0, 2),
        ("block-1", 0, 1, 2),
    ]
    (worker,) = update.workers
    assert (worker.worker, worker.part, worker.doing, dict(worker.losses)) == (
        "hand",
        1,
        rounds_pb2.DOING_TRAINING,
        {"denoise_nats": 2.5},
    )
    assert not worker.gone
    payload = net.payload("block-1")
    submission = net.submission(place, payload, losses={"denoise_nats": 2.25})
    assert link.submit(submission, payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    other = net.join("other", part=1)
    payload = net.payload("block-1", net.delta("block-1", 0.02))
    link.submit(net.submission(other, payload, "other", losses={"denoise_nats": 2.75}), payload)
    closed = next(update.parts[1].closed for update in link.watch(0.05) if update.parts[1].closed)
    assert [(c.first, c.last, c.updates, c.late, dict(c.losses)) for c in closed] == [
        (0, 0, 2, 0, {"denoise_nats": 2.5})
    ]
