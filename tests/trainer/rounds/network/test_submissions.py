"""Submitted updates: late or wrong ones are refused with the reason, and none is lost."""

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

import trainer.rounds.coordinator
from stages.errors import CheckpointError
from stages.wire.status import StatusError, retry_after_ms, trailing_metadata
from tests.conftest import PATIENCE_S, refused, until
from tests.trainer.rounds.network.calls import Start, pieces, submit
from tests.trainer.small import rounds_config
from trainer.rounds.service import MAX_CALLS, NewestCalls
from trainer.rounds.store import audit
from trainer.v1 import rounds_pb2


def test_a_late_update_is_dropped(network: Start) -> None:
    net = network(stale_discount=0.0, quorum=1.0, deadline_s=0.05)
    slow, quick = net.join("slow", part=0), net.join("quick", part=0)
    payload = net.payload("block-0")
    submit(net, net.submission(quick, payload, worker="quick"), payload)
    until(lambda: net.ledger.round("block-0") == 1)
    verdict = submit(net, net.submission(slow, payload, worker="slow", id="late"), payload)
    assert (verdict.outcome, verdict.reason) == (
        rounds_pb2.OUTCOME_REFUSED,
        "round 0 of block-0 is closed; late updates are dropped",
    )
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.dropped) == ([], 1, 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 0}, "an update must have 1 to 2 steps, not 0"),
        ({"steps": 3}, "an update must have 1 to 2 steps, not 3"),
        ({"codec": "int8"}, "updates of this round must be in fp32, not 'int8'"),
        ({"size": 5}, "an update of block-0 must have [0-9]+ bytes as fp32, not 5"),
        ({"size": 2**63}, "a file of 9223372036854775808 bytes"),
        ({"sha256": b"short"}, "a SHA-256 must have 32 bytes, not 5"),
        ({"round": 3}, "this run has rounds 0 to 2"),
        ({"base_version": 1}, "round 0 from version 1"),
        ({"sequences": 257}, "2 steps cannot read 257 sequences"),
        ({"id": "a/b"}, "submission id 'a/b' must be"),
        ({"losses": {"a": math.inf}}, "a loss must be a finite number"),
    ],
)
def test_a_wrong_header_is_refused_before_anything_is_stored(
    network: Start, changes: dict[str, Any], sentence: str
) -> None:
    net = network()
    place, payload = net.join(part=0), net.payload("block-0")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, sentence):
        submit(net, net.submission(place, payload, **changes), payload)
    assert list((net.out / "rounds" / "incoming").iterdir()) == []


def test_an_interrupted_submission_is_resumed(network: Start) -> None:
    wide = replace(rounds_config, architecture=replace(rounds_config.architecture, width=128, condition_dim=64))
    net = network(wide)
    place, payload = net.join(part=0), net.payload("block-0")
    header = rounds_pb2.SubmitRequest(submission=net.submission(place, payload))
    first, *_ = pieces(payload)
    for second, sentence in (
        (rounds_pb2.SubmitRequest(piece=first), f"the pieces ended after {len(first.data)} of {len(payload)} bytes"),
        (header, "only pieces may follow the header"),
    ):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, sentence):
            list(net.stub.Submit(iter([header, second]), timeout=PATIENCE_S))
    link = net.link()
    verdict = link.submit(header.submission, payload)
    assert verdict.outcome == rounds_pb2.OUTCOME_ACCEPTED
    assert link.sent_bytes == len(payload) - len(first.data)


def test_a_full_disk_loses_no_update(network: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.rounds.coordinator, "STORE_RETRY_S", 0.05)
    monkeypatch.setattr(trainer.rounds.service, "RETRY_MS", 50)
    net = network(replicas=1)
    store, failures, shown = net.ledger.store, ["save_members", "put_update", "commit", "put_version"], set[str]()

    def fail_once(name: str) -> None:
        real = getattr(store, name)

        def failing(*args: Any) -> Any:
            if name in failures:
                failures.remove(name)
                shown.add(net.coordinator.problem)
                raise CheckpointError(f"cannot save {name}: No space left on device; free some space")
            return real(*args)

        monkeypatch.setattr(store, name, failing)

    for name in list(failures):
        fail_once(name)
    with pytest.raises(grpc.RpcError) as refusal:
        net.join("w0")
    assert retry_after_ms(trailing_metadata(refusal.value)) == 50, "else whole updates would be sent again at once"
    net.work_together(None, None)
    until(lambda: net.coordinator.schedule.ended)
    assert failures == []
    assert any("cannot save put_update" in problem for problem in shown)
    net.check_audit(6)


# Rounds for which an update was refused: no round waits for another that will not come.


def test_a_round_does_not_wait_for_a_worker_that_has_passed_it(network: Start) -> None:
    """A refused update is not made again: without its worker a lockstep round would never end."""
    net = network()
    one, two = net.join("one", part=0), net.join("two", part=0)
    good = net.payload("block-0")
    assert submit(net, net.submission(one, good, worker="one"), good).outcome == rounds_pb2.OUTCOME_ACCEPTED
    bad = np.full(len(good) // 4, math.nan, np.float32).tobytes()
    verdict = submit(net, net.submission(two, bad, worker="two"), bad)
    assert verdict.outcome == rounds_pb2.OUTCOME_REFUSED
    assert "non-finite" in verdict.reason
    net.stub.Next(rounds_pb2.NextRequest(worker="two", lease=two.lease, after=0), timeout=PATIENCE_S)
    until(lambda: net.ledger.round("block-0") == 1)


def test_the_last_round_is_ordered_again_if_all_updates_were_refused(network: Start) -> None:
    net = network(rounds=1)
    bad = np.full(len(net.payload("block-0")) // 4, math.nan, np.float32).tobytes()
    answers, places = [], {name: net.join(name, part=0) for name in ("one", "two")}
    for name, place in places.items():
        assert submit(net, net.submission(place, bad, worker=name), bad).outcome == rounds_pb2.OUTCOME_REFUSED
        asked = rounds_pb2.NextRequest(worker=name, lease=place.lease, after=0)
        answers.append(net.stub.Next(asked, timeout=PATIENCE_S).WhichOneof("next"))
    assert answers == ["pause", "order"]


def test_a_newer_call_replaces_the_older_and_too_many_are_refused() -> None:
    streams = NewestCalls()
    with ExitStack() as stack:
        first = stack.enter_context(streams.begin("a"))
        other = stack.enter_context(streams.begin("b"))
        first()
        newest = [stack.enter_context(streams.begin("a")) for _ in range(MAX_CALLS - 1)][-1]
        newest(), other()
        with refused(grpc.StatusCode.UNAVAILABLE, "a newer call has replaced this one"):
            first()
        with pytest.raises(StatusError, match=f"{MAX_CALLS} identical calls are already open"), streams.begin("a"):
            pass
        newest()
    with streams.begin("a") as again:
        again()
