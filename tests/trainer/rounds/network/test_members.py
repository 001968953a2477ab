from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest

from stages.errors import ResumeError, ServiceError
from stages.wire.status import StatusError
from stages.wire.tls import LOOPBACK_ONLY, Security
from stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import refused
from tests.trainer.rounds.network.calls import Start
from trainer.rounds.members import Members, Place
from trainer.rounds.settings import PROTOCOL
from trainer.rounds.store import open_store
from trainer.v1 import rounds_pb2


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with open_store(tmp_path) as store:
        yield Members(store, 2, 2, 10.0, 0.0)


def refusal(job: object, *args: object) -> StatusError:
    with pytest.raises(StatusError) as caught:
        job(*args)  # type: ignore[operator]
    return caught.value


def test_parts_fill_evenly(members: Members) -> None:
    places = [members.join(f"w{i}", None, 0.0).place for i in range(4)]
    assert places == [Place(0, 0), Place(1, 0), Place(0, 1), Place(1, 1)]
    assert [members.present(part, 5.0) for part in (0, 1)] == [2, 2]


def test_a_full_run_and_a_full_part_are_refused(members: Members) -> None:
    for name in ("a", "b"):
        members.join(name, 1, 0.0)
    found = refusal(members.join, "c", 1, 0.0)
    assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found.message.startswith("part 1 already has as many workers as the run's settings allow, 2; --wait")
    assert found.retry_after_ms
    members.join("c", None, 0.0), members.join("d", None, 0.0)
    assert refusal(members.join, "e", None, 0.0).message.startswith("every part already has as many")


def test_a_worker_that_rejoins_keeps_its_place_with_a_new_lease(members: Members) -> None:
    first = members.join("a", None, 0.0)
    old, first.accepted = first.lease, 2
    members.join("b", None, 0.0)
    again = members.join("a", None, 1.0)
    assert (again.place, again.accepted) == (first.place, 2)
    assert refusal(members.called, "a", old, 1.0).code is grpc.StatusCode.ALREADY_EXISTS
    assert members.called("a", again.lease, 1.0) is again
    assert refusal(members.join, "a", None, 10.9, "", "", True).message.startswith("another process already works as a")
    assert members.join("a", None, 11.1, stands_by=True).place == first.place


def test_a_place_whose_worker_is_gone_goes_to_another(members: Members) -> None:
    gone = members.join("a", 0, 0.0)
    gone.record_finished(3)
    members.join("b", 0, 8.0)
    taken = members.join("c", 0, 12.0)
    assert taken.place == gone.place
    assert taken.finished == 3, "submitted updates are not ordered again"
    assert refusal(members.called, "a", gone.lease, 12.0).code is grpc.StatusCode.ABORTED


def test_an_expired_lease_holds_until_the_place_is_taken(members: Members) -> None:
    a = members.join("a", 0, 0.0)
    assert not members.is_present(a, 50.0)
    assert members.called("a", a.lease, 50.0) is a
    assert members.is_present(a, 50.0)


def test_a_key_has_one_place_under_any_name(members: Members) -> None:
    first = members.join("ann.1", 0, 0.0, key="ann")
    found = refusal(members.join, "ann.2", 1, 9.0, "", "ann")
    assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found.message.startswith("ann already has a place, as ann.1: a key has one place")
    assert members.join("bob", 0, 9.0, key="bob").voter == "bob"
    assert members.join("ann.2", 1, 12.0, key="ann").place.part == 1, (
        "its first lease ran out: no worker took the place"
    )
    assert refusal(members.called, "ann.1", first.lease, 12.0).code is grpc.StatusCode.ABORTED
    members.store.save_members(members.records())
    assert [m.voter for m in Members(members.store, 2, 2, 10.0, 12.0)] == ["ann", "bob", "ann"]
    assert [members.join(name, 0, 30.0).voter for name in ("x", "y")] == ["place-0", "place-1"]


def test_places_and_their_finished_rounds_survive_workers_and_a_restart(members: Members) -> None:
    first, gone = members.join("a", 0, 0.0), members.join("b", 1, 0.0)
    first.record_finished(3)
    members.leave(first), members.leave(gone)
    members.join("c", 0, 0.0)
    d = members.join("d", 0, 0.0)
    members.store.save_members(members.records())
    again = Members(members.store, 2, 2, 10.0, 1000.0)
    assert sorted(member.finished for member in again if member.place.part == 0) == [-1, 3]
    again.remember("d", 0, 5)
    assert again.called("d", d.lease, 1000.0).finished == 5
    assert again.present(1, 1000.0) == 0


PLACE = '{"worker": "a", "lease": "", "device": "", "key": "", "part": %s, "replica": 0, "finished": %s}'


@pytest.mark.parametrize("record", ["{}", "[]", "{", PLACE % ('"0"', "0"), PLACE % ("0", "NaN")])
def test_a_damaged_place_is_reported(members: Members, record: str) -> None:
    members.store.database.execute("INSERT INTO members VALUES (0, 0, ?)", (record,))
    with pytest.raises(ResumeError, match=r"(has a place that makes no sense|cannot read) .*; restore a copy"):
        Members(members.store, 2, 2, 10.0, 0.0)


def test_a_worker_on_a_closed_round_is_late_until_its_update_arrives(members: Members) -> None:
    member = members.join("ann", None, 0.0)
    assert not member.is_late(0)
    member.record_order(3)
    assert (member.is_late(3), member.is_late(4)) == (False, True)
    member.beat = rounds_pb2.BeatRequest(doing=rounds_pb2.DOING_TRAINING, round=3, steps=5)
    assert member.is_late(4)
    member.record_finished(3)
    assert (member.is_late(4), member.beat.doing) == (False, rounds_pb2.DOING_WAITING)
    assert member.is_late(5), "it does not come for more"
    member.record_order(4)
    member.record_finished(3)  # a repeated call
    assert member.beat.doing == rounds_pb2.DOING_FETCHING


# Access to work, and the reason of a refusal.


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"part": 2}, "NOT_FOUND", "part 2 does not exist: this run has parts 0 to 1"),
        ({"protocol": 0}, "FAILED_PRECONDITION", "your worker speaks protocol 1 .* upgrade onesweep on your worker"),
        ({"protocol": 99}, "FAILED_PRECONDITION", "speaks protocol 99 of .* upgrade onesweep on this coordinator"),
        (
            {"incarnation": "5"},
            "FAILED_PRECONDITION",
            "was lost or replaced; restore the right directory",
        ),
        ({"version": "0.0.1"}, "FAILED_PRECONDITION", "you have version '0.0.1' of onesweep"),
        ({"run": "5" * 64}, "FAILED_PRECONDITION", "your state is of run 555555555555"),
        ({"data": "5" * 64}, "FAILED_PRECONDITION", "is not that of this run, words.txt"),
        ({"data": ""}, "FAILED_PRECONDITION", r"your training text \(none\) is not that of this run"),
        ({"worker": "../x"}, "INVALID_ARGUMENT", "worker '../x' must be 1 to 64 letters"),
    ],
)
def test_an_unfit_worker_is_refused_with_the_reason(
    network: Start, changes: dict[str, Any], code: str, sentence: str
) -> None:
    with refused(grpc.StatusCode[code], sentence):
        network().join(**changes)


def test_a_token_allows_work_under_its_own_name(network: Start, tmp_path: Path) -> None:
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
        return str(caught.value)

    assert "a token is required" in code_of("ann", "")
    assert "key bob lacks scope work: it has only status" in code_of("bob", other)
    assert "you are ann: you may work only as ann or ann.SUFFIX, not as 'eve'" in code_of("eve", token)
    assert "protocol 1 of rounds" in code_of("ann.2", token), "an admitted worker gets the next problem"
    fits = {"version": version("onesweep"), "data": net.corpus.digest(), "protocol": PROTOCOL}
    request = rounds_pb2.JoinRequest(worker="ann.1", **fits)
    assert net.link(token=token).join(request).part == 0
    assert "ann already has a place, as ann.1" in code_of("ann.2", token)
    watcher = net.link(token=other)
    assert next(watcher.watch(1.0)).rounds == 3


def test_a_certificate_allows_work_under_its_own_name(network: Start, new_pki: Callable[[str], Any]) -> None:
    pki = new_pki("pki")
    server, worker, host = pki.issue("router", "hub"), pki.issue("client", "ann"), pki.issue("host", "h")
    net = network(coordinator={"security": Security(server)}, replicas=1)

    def problem(name: str, security: Security) -> str:
        link = net.link(security=security, patience_s=1.0)
        with pytest.raises(ServiceError) as caught:
            link.join(rounds_pb2.JoinRequest(worker=name))
        return str(caught.value)

    assert "of rounds" in problem("ann", Security(worker)), "an admitted worker gets the next problem"
    assert "you are ann: you may work only as ann" in problem("eve", Security(worker))
    assert "a worker needs role client" in problem("h", Security(host))
    assert "closed the connection" in problem("ann", LOOPBACK_ONLY)
