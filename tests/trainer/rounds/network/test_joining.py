"""Who may work, and who is told why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.errors import ServiceError
from stages.security import LOOPBACK_ONLY, Security
from stages.tokens import Key, new_token, token_hash, write_tokens
from tests.trainer.rounds.network.calls import Start, refused
from trainer.config import TrainingConfig
from trainer.rounds.plan import architecture_digest
from trainer.v1 import rounds_pb2


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
