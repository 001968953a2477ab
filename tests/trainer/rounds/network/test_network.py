"""Rounds over real gRPC: the same weights as in one process, and what is refused."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from stages.checkpoint import load_chain
from stages.errors import CheckpointError, ServiceError
from stages.manifest import read_manifest
from stages.security import LOOPBACK_ONLY, Security
from stages.tokens import Key, new_token, token_hash, write_tokens
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.audit import audit
from trainer.rounds.client import LeaseLostError
from trainer.rounds.fleet import Fleet
from trainer.rounds.inprocess import Engine
from trainer.rounds.plan import architecture_digest
from trainer.rounds.store import MemoryStore
from trainer.rounds.transfer import pieces
from trainer.v1 import rounds_pb2

Start = Callable[..., Any]


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    def whole() -> None:
        outcome = call()
        list(outcome if hasattr(outcome, "__iter__") else ())

    with pytest.raises(grpc.RpcError) as caught:
        whole()
    return caught.value.code(), caught.value.details()


def submit(network: Any, submission: Any, payload: bytes) -> Any:
    """Header and pieces at once, as nobody does who waits for the offset; the last answer."""
    requests = [rounds_pb2.SubmitRequest(submission=submission)]
    requests += [rounds_pb2.SubmitRequest(piece=piece) for piece in pieces(payload)]
    return list(network.stub.Submit(iter(requests), timeout=30))[-1].verdict


# The same as in one process


@pytest.mark.parametrize(
    "rounds",
    [
        {},
        {"codec": "int8", "down_codec": "int8"},
        {"outer": "mean", "outer_rate": 1.0},
        {"fragments": 2, "steps_per_round": 3},
        {"fragments": 2, "overlap": "naive"},
        {"overlap": "eager", "codec": "e3m0"},
    ],
    ids=["plain", "int8 both ways", "mean", "fragments", "naive fragments", "eager"],
)
def test_four_workers_make_the_weights_of_one_process(
    network: Start, corpus: Corpus, until: Callable[..., Any], rounds: dict[str, Any]
) -> None:
    net = network(**rounds)
    assert net.work_together(None, None, None, None) == [3, 3, 3, 3]
    until(lambda: net.over, 60)  # modules are drawn from one generator: nobody else may draw meanwhile
    engine = Engine(net.plan.frame, corpus, MemoryStore(), Fleet())
    engine.run()
    for part, expected in engine.published().items():
        found = net.plan.cutting.whole(part, net.ledger.weights)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert [net.ledger.round(fragment) for fragment in net.ledger.parts()] == [3] * len(net.ledger.parts())
    merged = 12 * net.plan.config.rounds.fragments
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.merged) == ([], merged, merged)


@pytest.mark.parametrize(
    ("context", "rounds"),
    [
        ("chained", {}),
        ("chained", {"lookahead": True, "copies_codec": "e3m0"}),
        ("own", {"model": "scorer", "fragments": 2, "copies_codec": "int8", "copies_every": 2}),
        ("own", {"model": "ar"}),
        ("own", {"overlap": "naive"}),
        ("own", {"overlap": "eager"}),
    ],
)
def test_every_kind_of_run_comes_to_its_end(
    network: Start, rounds_config: TrainingConfig, until: Callable[..., Any], context: str, rounds: dict[str, Any]
) -> None:
    config = replace(rounds_config, architecture=replace(rounds_config.architecture, context=context))
    net = network(config, **{"replicas": 1, "rounds": 2, **rounds})
    trained = net.work_together(*[None] * len(net.plan.parts))
    assert trained == [2] * len(net.plan.parts)
    until(lambda: net.coordinator.ended, 30)
    found = audit(net.out / "rounds")
    assert found.problems == []
    assert found.merged == 2 * len(net.ledger.parts())


def test_the_end_is_a_checkpoint_that_loads(network: Start, until: Callable[..., Any]) -> None:
    net = network(replicas=1)
    net.work_together(None, None)
    until(lambda: "chain" in read_manifest(net.out).metrics, 60)
    for block, part in zip(load_chain(net.out), net.plan.parts, strict=True):
        weights = net.ledger.weights(part)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in block.named_parameters())


# Joining


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"part": 2}, "NOT_FOUND", "there is no part 2: this run has parts 0 to 1"),
        ({"version": "0.0.1"}, "FAILED_PRECONDITION", "you have version '0.0.1' of onesweep"),
        ({"architecture": "5" * 64}, "FAILED_PRECONDITION", "another architecture than this run"),
        ({"run": "5" * 64}, "FAILED_PRECONDITION", "your state is of the run 555555555555"),
        ({"data_kind": "pictures"}, "FAILED_PRECONDITION", "this run learns from bytes, not 'pictures'"),
        ({"data": "5" * 64}, "FAILED_PRECONDITION", "is not that of this run, words.txt"),
        ({"data": ""}, "FAILED_PRECONDITION", r"your training text \(none\) is not that of this run"),
        ({"worker": "../x"}, "INVALID_ARGUMENT", "worker '../x' must be 1 to 64 letters"),
    ],
)
def test_who_does_not_fit_is_told_why(network: Start, changes: dict[str, Any], code: str, sentence: str) -> None:
    found, details = refused(lambda: network().join(**changes))
    assert found.name == code
    assert re.search(sentence, details)


def test_more_workers_than_planned_are_told(network: Start) -> None:
    net = network(replicas=1)
    net.join("a"), net.join("b")
    with pytest.raises(ServiceError, match="every part has its 1 workers, as many as the run's settings plan"):
        net.work("c")


def test_own_data_may_be_allowed(network: Start, rounds_config: TrainingConfig) -> None:
    net = network(coordinator={"own_data": True})
    place = net.join(data="5" * 64, architecture=architecture_digest(net.plan.config.architecture))
    assert (place.part, place.replica, place.codec) == (0, 0, "fp32")


# Handing in


def test_an_update_counts_once(network: Start) -> None:
    net = network()
    place, payload = net.join(part=0), net.payload("block-0")
    submission = net.submission(place, payload)
    assert submit(net, submission, payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    assert submit(net, submission, payload).outcome == rounds_pb2.OUTCOME_DUPLICATE
    other = net.submission(place, payload, id="another-name")
    verdict = submit(net, other, payload)
    assert verdict.outcome == rounds_pb2.OUTCOME_REFUSED
    assert "has handed in" in verdict.reason
    assert audit(net.out / "rounds").accepted == 1


def test_the_deadline_of_the_first_round_counts_from_the_start_of_the_coordinator(network: Start) -> None:
    net = network(deadline="fixed", deadline_s=1000.0)
    place, payload = net.join(part=0), net.payload("block-0")
    submit(net, net.submission(place, payload), payload)
    due = net.ledger.due_at("block-0")
    assert due is not None
    assert due > net.coordinator.clock()


def test_updates_that_are_not_numbers_are_refused_and_the_run_goes_on(network: Start) -> None:
    net = network()
    place = net.join(part=0)
    payload = np.full(len(net.payload("block-0")) // 4, math.nan, np.float32).tobytes()
    verdict = submit(net, net.submission(place, payload), payload)
    assert verdict.outcome == rounds_pb2.OUTCOME_REFUSED
    assert "not finite" in verdict.reason
    good = net.payload("block-0")
    assert submit(net, net.submission(place, good), good).outcome == rounds_pb2.OUTCOME_ACCEPTED


def test_late_work_is_judged_by_rule(network: Start, until: Callable[..., Any]) -> None:
    net = network(late="drop", deadline="fixed", deadline_s=0.05)
    slow, quick = net.join("slow", part=0), net.join("quick", part=0)
    payload = net.payload("block-0")
    submit(net, net.submission(quick, payload, worker="quick"), payload)
    until(lambda: net.ledger.round("block-0") == 1, 30)
    verdict = submit(net, net.submission(slow, payload, worker="slow", id="late"), payload)
    assert (verdict.outcome, verdict.reason) == (
        rounds_pb2.OUTCOME_REFUSED,
        "round 0 of block-0 was closed, and late work is dropped",
    )
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.dropped) == ([], 1, 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 0}, "a round has 1 to 2 steps, not 0"),
        ({"steps": 3}, "a round has 1 to 2 steps, not 3"),
        ({"codec": "int8"}, "updates of this run travel as fp32, not 'int8'"),
        ({"size": 5}, "an update of block-0 has [0-9]+ bytes as fp32, not 5"),
        ({"size": 2**63}, "a file of 9223372036854775808 bytes"),
        ({"sha256": b"short"}, "a SHA-256 has 32 bytes, not 5"),
        ({"round": 3}, "this run has rounds 0 to 2"),
        ({"base_version": 1}, "round 0 from version 1"),
        ({"sequences": 5}, "2 steps do not see 5 sequences"),
        ({"fragment": 1}, "no fragment 1: parts of this run have 1"),
        ({"id": "a/b"}, "submission id 'a/b' must be"),
        ({"losses": {"a": math.inf}}, "a loss must be a finite number"),
    ],
)
def test_a_wrong_header_is_refused_before_anything_is_stored(
    network: Start, changes: dict[str, Any], sentence: str
) -> None:
    net = network()
    place, payload = net.join(part=0), net.payload("block-0")
    code, details = refused(lambda: submit(net, net.submission(place, payload, **changes), payload))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(sentence, details)
    assert list((net.out / "rounds" / "incoming").iterdir()) == []


def test_a_cut_submission_goes_on_where_it_ended(network: Start, rounds_config: TrainingConfig) -> None:
    wide = replace(rounds_config, architecture=replace(rounds_config.architecture, width=128, condition_dim=64))
    net = network(wide)
    place, payload = net.join(part=0), net.payload("block-0")
    header = rounds_pb2.SubmitRequest(submission=net.submission(place, payload))
    first, *_ = pieces(payload)
    code, details = refused(lambda: net.stub.Submit(iter([header, rounds_pb2.SubmitRequest(piece=first)]), timeout=30))
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"the pieces ended after {len(first.data)} of {len(payload)} bytes",
    )
    link = net.link()
    verdict = link.submit(header.submission, payload)
    assert verdict.outcome == rounds_pb2.OUTCOME_ACCEPTED
    assert link.sent_bytes == len(payload) - len(first.data)
    link.close()


def test_a_damaged_payload_is_sent_anew(network: Start) -> None:
    net = network()
    place, payload = net.join(part=0), net.payload("block-0")
    other = bytes(len(payload))
    code, _ = refused(lambda: submit(net, net.submission(place, payload), other))
    assert code is grpc.StatusCode.DATA_LOSS
    assert submit(net, net.submission(place, payload), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED


def test_a_full_disk_loses_nothing(network: Start, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(replicas=1)
    store, failures = net.ledger.store, ["put_update", "commit", "put_version"]

    def fail_once(name: str) -> None:
        real = getattr(store, name)

        def failing(*args: Any) -> Any:
            if name in failures:
                failures.remove(name)
                raise CheckpointError(f"cannot save {name}: No space left on device; free some space")
            return real(*args)

        monkeypatch.setattr(store, name, failing)

    for name in list(failures):
        fail_once(name)
    net.work_together(None, None)
    until(lambda: net.coordinator.ended, 30)
    assert failures == []
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.merged) == ([], 6, 6)


# Leases and fetching


def test_a_lease_that_is_not_ours_is_refused(network: Start) -> None:
    net = network()
    place = net.join()
    net.join()
    link = net.link()
    with pytest.raises(LeaseLostError, match="hand has no such lease"):
        link.next(rounds_pb2.NextRequest(worker="hand", lease=place.lease))
    link.close()


def test_a_part_whose_worker_is_gone_is_given_to_another(network: Start, until: Callable[..., Any]) -> None:
    net = network(coordinator={"lease_s": 0.5}, replicas=1, rounds=1)
    net.join("silent", part=0)
    assert net.work("w0", part=0, wait=True) == 1
    assert net.work("w1", part=1) == 1
    until(lambda: net.coordinator.ended, 30)


def test_a_lockstep_round_does_not_wait_for_a_worker_that_is_gone(network: Start, until: Callable[..., Any]) -> None:
    net = network(coordinator={"lease_s": 2.0})
    net.join("silent", part=0)
    place, payload = net.join(part=0), net.payload("block-0")
    assert submit(net, net.submission(place, payload), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    until(lambda: net.ledger.round("block-0") == 1, 60)
    found = audit(net.out / "rounds")
    assert (found.problems, found.accepted, found.merged) == ([], 1, 1)


def test_the_first_round_begins_with_its_first_order(network: Start) -> None:
    net = network(replicas=1)
    place, payload = net.join(part=0), net.payload("block-0")
    time.sleep(0.2)  # nobody is there to train
    asked = time.monotonic()
    net.stub.Next(rounds_pb2.NextRequest(worker="hand", lease=place.lease), timeout=30)
    assert submit(net, net.submission(place, payload), payload).outcome == rounds_pb2.OUTCOME_ACCEPTED
    (accepted,) = [record for record in net.ledger.store.records() if record["kind"] == "accepted"]
    assert accepted["after_s"] <= time.monotonic() - asked + 0.001


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
    link.close()


def test_tokens_say_who_may_work_and_as_whom(network: Start, tmp_path: Path) -> None:
    token, other = new_token(), new_token()
    keys = [Key("ann", token_hash(token), ("work",)), Key("bob", token_hash(other), ("status",))]
    write_tokens(tmp_path / "tokens", keys)
    net = network(coordinator={"tokens": tmp_path / "tokens"})
    request = rounds_pb2.JoinRequest(worker="ann.2")

    def code_of(worker: str, shown: str) -> str:
        request.worker = worker
        link = net.link(token=shown)
        with pytest.raises(ServiceError) as caught:
            link.join(request)
        link.close()
        return str(caught.value)

    assert "a token is wanted here" in code_of("ann", "")
    assert "key bob may status only, not work" in code_of("bob", other)
    assert "you are ann: you may work as ann or ann.SOMETHING only, not as 'eve'" in code_of("eve", token)
    assert "of onesweep" in code_of("ann.2", token), "who may work hears of the next problem"
    watcher = net.link(token=other)
    assert next(watcher.watch(1.0)).rounds == 3
    watcher.close()


def test_certificates_say_who_may_work(network: Start, new_pki: Callable[[str], Any]) -> None:
    pki = new_pki("pki")
    server, worker, host = pki.issue("router", "hub"), pki.issue("client", "ann"), pki.issue("host", "h")
    net = network(coordinator={"security": Security(server)}, replicas=1)

    def problem(name: str, security: Security) -> str:
        link = net.link(security=security, patience_s=1.0)
        with pytest.raises(ServiceError) as caught:
            link.join(rounds_pb2.JoinRequest(worker=name))
        link.close()
        return str(caught.value)

    assert "of onesweep" in problem("ann", Security(worker)), "who may work hears of the next problem"
    assert "you are ann: you may work as ann" in problem("eve", Security(worker))
    assert "a worker needs one of role client" in problem("h", Security(host))
    assert "closed the connection" in problem("ann", LOOPBACK_ONLY)


# What commands are told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["work", "--coordinator", "127.0.0.1:1", "--data", "/nowhere"], "no text at /nowhere"),
        (["work", "--coordinator", "127.0.0.1:1", "--name", "a b"], "--name 'a b' must be"),
        (["work", "--coordinator", "10.0.0.1:1"], "traffic would not be encrypted"),
        (["work", "--coordinator", "127.0.0.1:1", "--block", "-1"], "--block must be the number of a part"),
        (["work", "--coordinator", "127.0.0.1:1", "--patience", "nan"], "--patience must be from 0"),
        (["coordinate", "--listen", "127.0.0.1:0", "--lease", "0"], "--lease must be from 0.5"),
        (["coordinate", "--listen", "127.0.0.1:0", "--publish-every", "0"], "--publish-every must be at least 1"),
        (["coordinate", "--listen", "127.0.0.1:0", "--config", "H0"], "steps_per_round must be a whole number from 1"),
        (["coordinate", "--listen", "127.0.0.1:0", "--config", "pieces"], "a fragment has at least one; give fewer"),
        (["rounds", "127.0.0.1:1", "--once"], "no coordinator answers at 127.0.0.1:1"),
    ],
)
def test_commands_say_what_is_wrong(
    onesweep: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "H0").write_text("[rounds]\nsteps_per_round = 0")
    (tmp_path / "pieces").write_text("[rounds]\nfragments = 256\nsteps_per_round = 256")
    outcome = onesweep(*arguments)
    assert sentence in outcome.message
    assert outcome.code in (1, 2)


def test_a_checkpoint_of_another_run_is_told(
    onesweep: Callable[..., Any], network: Start, text_file: Path, settings: Callable[..., Path]
) -> None:
    net, other = network(), settings()
    given = ("--config", other, "--data", text_file, "--out", net.out, "--threads", 1)
    outcome = onesweep("coordinate", "--listen", "127.0.0.1:0", *given)
    assert "holds a checkpoint of other settings or data; give another --out" in outcome.message


def test_checkpoints_are_published_while_the_run_goes_on(network: Start, until: Callable[..., Any]) -> None:
    net = network(replicas=1, rounds=2, coordinator={"publish_every": 1})
    place, payload = net.join(part=0), net.payload("block-0")
    submit(net, net.submission(place, payload), payload)
    other = net.join("other", part=1)
    payload = net.payload("block-1")
    submit(net, net.submission(other, payload, worker="other"), payload)
    until(lambda: net.coordinator.publisher.published == {"block-0": 1, "block-1": 1}, 30)
    assert not net.coordinator.ended
    weights = net.ledger.weights("block-0")
    block, _ = load_chain(net.out)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in block.named_parameters())


def test_weights_that_are_confidently_wrong_are_not_published(network: Start) -> None:
    net = network(replicas=1)
    publisher, weights = net.coordinator.publisher, {part: net.ledger.weights(part) for part in net.plan.parts}
    publisher.publish({part: (0, tensors) for part, tensors in weights.items()}, last=False)
    before = read_manifest(net.out)
    newer = {name: 1.01 * tensor for name, tensor in weights["block-0"].items()}
    wrong = {name: 100 * tensor for name, tensor in weights["block-1"].items()}
    wrong["clean_head.bias"] = torch.arange(256.0)
    with pytest.raises(CheckpointError, match=r"block-1 is not published: .* the checkpoint stays as it was"):
        publisher.publish({"block-0": (1, newer), "block-1": (1, wrong)}, last=False)
    assert read_manifest(net.out) == before
