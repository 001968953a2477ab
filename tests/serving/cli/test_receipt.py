"""Receipts: what hosts sign of a text, checked later. Real processes, with certificates."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson, Parse

from onesweep.serving.cli.admin import ADAPTIVE
from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import Client
from onesweep.serving.router.topology import Topology
from onesweep.serving.v1 import router_pb2
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.auth import HOST
from onesweep.stages.wire.certificates import Authority, sign_statement
from onesweep.stages.wire.tls import Tls
from tests.conftest import Pki, until
from tests.serving.test_tls import over_tls

Run = Callable[..., tuple[int, str, str]]
Change = Callable[[router_pb2.Receipt, "Signed"], object]
PROMPT = "The old man "


@dataclass(frozen=True)
class Signed:
    """A ring over TLS with a second router, and another authority."""

    topology: Topology
    second: str
    directory: Path
    others: Pki

    @property
    def ca(self) -> Path:
        assert self.topology.certificates is not None
        return self.topology.certificates / "ca.pem"

    def keys(self, name: str) -> Tls:
        return Tls(self.ca, self.ca.with_name(f"{name}.pem"), self.ca.with_name(f"{name}.key"))


@pytest.fixture(scope="module")
def signed(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signed]:
    directory, second = tmp_path_factory.mktemp("signed"), f"127.0.0.1:{free_port_block(1)}"
    mine, others = (Pki(Authority.create(directory / name, days=10)) for name in ("certs", "others"))
    topology = over_tls(mine, bundles / "own")
    with temporary_deployment(topology, bundles / "own", second=second):
        with Client(second, tls=topology.client_tls) as client:
            until(lambda: client.status().ready, 60.0)
        yield Signed(topology, second, directory, others)


def written(signed: Signed, onesweep: Run, *options: object) -> Path:
    file = signed.directory / "receipt.json"
    command = ("generate", PROMPT, "--router", signed.topology.router, "--tls-ca", signed.ca, "--receipt", file)
    code, _, err = onesweep(*command, "--seed", 5, *options)
    assert code == 0, err
    return file


def signed_anew(statement: stage_pb2.Statement, keys: Tls, **changes: Any) -> None:
    """Change what a host stated, and sign it with some key."""
    stated = stage_pb2.Stated.FromString(statement.content)
    for name, value in changes.items():
        setattr(stated, name, value)
    statement.CopyFrom(sign_statement(stated, keys))


@pytest.mark.parametrize("mode", ["ar", "sweep", "chunked", "ar-speculative", "resample", "verified", "auto"])
def test_a_receipt_holds_and_the_request_runs_again(signed: Signed, onesweep: Run, mode: str) -> None:
    def checked() -> bool:
        file = written(signed, onesweep, "--mode", mode, "--max-bytes", 40, "--stream")
        code, out, err = onesweep("receipt", "check", file, "--ca", signed.ca, "--against", signed.second)
        assert (code, "40 bytes: signed by all hosts" in out) == (0, True), err
        assert "run again: the same text" in out
        assert "; host-1, host-2, host-3 had a part in both" in out
        assert file.stat().st_size < 16_000
        return "by the same states" in out or mode in ADAPTIVE

    until(checked, 60.0)  # a second try for a late result goes by other states


def test_a_text_that_a_stop_string_ended(signed: Signed, onesweep: Run) -> None:
    """The hosts go on until they hear of it, each by another number of steps."""
    with Client(signed.topology.router, tls=signed.topology.client_tls) as client:
        whole = client.generate(PROMPT, mode="ar", seed=5, max_bytes=200).output
        stop = next(bytes([b]) for b in whole[3:] if b < 128)
        result = client.generate(PROMPT, mode="ar", seed=5, max_bytes=200, stops=[stop], receipt=True)
    assert result.output == whole[: whole.index(stop)]
    (signed.directory / "stopped.json").write_text(MessageToJson(result.receipt))
    code, out, err = onesweep("receipt", "check", signed.directory / "stopped.json", "--ca", signed.ca)
    assert (code, re.findall("(host-.): blocks (.)", out)) == (
        0,
        [("host-1", "0"), ("host-2", "1"), ("host-3", "2")],
    ), err


OTHER_HASH = bytes(32)


ALL = "not every host of the path signed, once and for all blocks of the model"
LIE = "what host host-1 signed that it sent is not what host host-2 signed that it received: one of them is faulty"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r, s: setattr(r, "text", bytes([r.text[0] ^ 1]) + r.text[1:]),
            "the text is not the one that the hosts",
        ),
        (lambda r, s: setattr(r, "claim", r.claim + r.claim), "the hosts signed this for another request or text"),
        (lambda r, s: setattr(r.statements[0], "content", r.statements[0].content + b"x"), "a statement was changed"),
        (lambda r, s: setattr(r.statements[0], "certificate", b"x"), "a statement was changed"),
        (lambda r, s: r.statements.pop(2), ALL),
        (lambda r, s: r.statements.append(r.statements[2]), ALL),
        (lambda r, s: r.ClearField("statements"), "no host signed anything"),
        (lambda r, s: r.missing.append("host x did not sign: it is lost"), "host x did not sign: it is lost"),
        (lambda r, s: signed_anew(r.statements[0], s.keys("host-1"), sent=OTHER_HASH), LIE),
        (lambda r, s: signed_anew(r.statements[0], s.keys("host-1"), step=3), "different weights or steps"),
        (lambda r, s: signed_anew(r.statements[0], s.keys("host-1"), unix_s=0), "its certificate was not valid then"),
        (lambda r, s: signed_anew(r.statements[0], s.keys("host-1"), unix_s=1 << 60), "a statement was changed"),
        (lambda r, s: signed_anew(r.statements[0], s.keys("host-2")), ALL),
        (lambda r, s: signed_anew(r.statements[0], s.keys("router")), "who signed as host router is no such host"),
        (lambda r, s: signed_anew(r.statements[0], s.others.issue(HOST, "host-1", force=True)), "is no such host"),
    ],
)
def test_a_receipt_that_does_not_hold(signed: Signed, onesweep: Run, change: Change, said: str) -> None:
    file = written(signed, onesweep, "--mode", "ar", "--max-bytes", 12)
    receipt = Parse(file.read_text(), router_pb2.Receipt())
    receipt.statements.sort(key=lambda each: stage_pb2.Stated.FromString(each.content).place)
    change(receipt, signed)
    file.write_text(MessageToJson(receipt))
    code, out, err = onesweep("receipt", "check", file, "--ca", signed.ca)
    assert (code, out) == (1, "")
    assert said in err


@pytest.mark.parametrize(
    ("text", "received", "said"),
    [(b"x", b"", "gives another text"), (b"", OTHER_HASH, "the states are not: a host computes otherwise")],
)
def test_a_second_run_finds_what_all_that_signed_agree_on(
    signed: Signed, onesweep: Run, text: bytes, received: bytes, said: str
) -> None:
    """A router may tell the hosts another text, and they may sign any states together."""
    file = written(signed, onesweep, "--mode", "sweep", "--max-bytes", 12)
    receipt = Parse(file.read_text(), router_pb2.Receipt())
    claim = router_pb2.Claim.FromString(receipt.claim)
    receipt.text = text or receipt.text
    claim.text = hashlib.sha256(receipt.text).digest()
    receipt.claim = claim.SerializeToString()
    for each in receipt.statements:
        stated, digest = stage_pb2.Stated.FromString(each.content), hashlib.sha256(receipt.claim).digest()
        changes = {"received": received} if received and not stated.place else {}
        signed_anew(each, signed.keys(stated.host), claim=digest, **changes)
    file.write_text(MessageToJson(receipt))
    assert onesweep("receipt", "check", file, "--ca", signed.ca)[0] == 0
    code, _, err = onesweep("receipt", "check", file, "--ca", signed.ca, "--against", signed.second)
    assert (code, said in err) == (1, True)


def test_who_asks_for_what_cannot_be_signed_or_read(
    signed: Signed, deployment: Any, onesweep: Run, tmp_path: Path
) -> None:
    file = tmp_path / "receipt.json"
    code, _, err = onesweep("generate", "x", "--router", deployment.topology.router, "--mode", "ar", "--receipt", file)
    assert (code, "hosts sign receipts with the keys of their certificates" in err) == (2, True)
    secure = ("generate", "x", "--router", signed.topology.router, "--tls-ca", signed.ca, "--receipt")
    assert onesweep(*secure, file, "--mode", "local")[0] == 2
    assert onesweep(*secure, tmp_path / "none" / "x", "--mode", "ar")[0] == 2
    for text in ("{", '{"text": 7}', '{"claim": "eA=="}', "[" * 100_000):
        file.write_text(text)
        code, _, err = onesweep("receipt", "check", file, "--ca", signed.ca)
        assert (code, "is no receipt" in err) == (2, True)
