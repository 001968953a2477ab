"""Receipts: what hosts sign of a text, checked later. Real processes, with certificates."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.cli.admin import Receipt, receipt_of
from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import Client
from onesweep.serving.router.topology import Topology
from onesweep.stages.wire.auth import HOST
from onesweep.stages.wire.certificates import Authority, sign_statement
from onesweep.stages.wire.tls import Tls
from tests.conftest import Pki, until
from tests.serving.test_tls import over_tls

Run = Callable[..., tuple[int, str, str]]
Change = Callable[[dict[str, Any], "Signed"], object]
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


def signed_anew(statement: dict[str, str], keys: Tls, **changes: Any) -> None:
    statement["content"] = json.dumps({**json.loads(statement["content"]), **changes})
    certificate, signature = sign_statement(statement["content"], keys)
    statement.update(certificate=certificate.decode(), signature=signature.hex())


@pytest.mark.parametrize("mode", ["ar", "sweep", "chunked", "ar-speculative", "resample", "verified"])
def test_a_receipt_holds_and_the_request_runs_again(signed: Signed, onesweep: Run, mode: str) -> None:
    file = written(signed, onesweep, "--mode", mode, "--max-bytes", 40, "--stream")
    code, out, err = onesweep("receipt", "check", file, "--ca", signed.ca, "--against", signed.second)
    assert (code, "40 bytes: signed by all hosts" in out) == (0, True), err
    assert "run again: the same text" in out
    if mode != "ar-speculative":
        assert "by the same states; host-1, host-2, host-3 had a part in both" in out, out
    assert file.stat().st_size < 16_000


def test_a_text_that_a_stop_string_ended(signed: Signed, onesweep: Run) -> None:
    """The hosts go on until they hear of it, each by another number of steps."""
    with Client(signed.topology.router, tls=signed.topology.client_tls) as client:
        whole = client.generate(PROMPT, mode="ar", seed=5, max_bytes=200).output
        request, stop = {"mode": "ar", "seed": 5, "max_bytes": 200}, next(bytes([b]) for b in whole[3:] if b < 128)
        result = client.generate(PROMPT, **request, stops=[stop], receipt=True)
    assert result.output == whole[: whole.index(stop)]
    receipt = Receipt.parse(receipt_of(PROMPT, request, result).encode(), "")
    (said,) = receipt.checked(signed.ca)
    assert [each["host"] for each in said] == ["host-1", "host-2", "host-3"]


def changed_text(record: dict[str, Any], signed: Signed) -> None:
    record["text_hex"] = f"{int(record['text_hex'][0], 16) ^ 1:x}{record['text_hex'][1:]}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_text, "this text is not the one that the hosts signed"),
        (lambda r, s: r.update(prompt="The old woman "), "this prompt is not the one that the hosts signed"),
        (lambda r, s: r["asked"].update(seed=6), "another mode, seed or setting than was asked for"),
        (lambda r, s: r["asked"].update(temperature=0.5), "another mode, seed or setting than was asked for"),
        (
            lambda r, s: r["statements"][0].update(content=r["statements"][0]["content"] + " "),
            "a statement was changed",
        ),
        (lambda r, s: r["statements"].pop(1), "not every host of the path signed once"),
        (lambda r, s: r["statements"].pop(2), "a host of the path did not sign, or those that did lack blocks"),
        (lambda r, s: r.update(claim=r["claim"] + " "), "host host-1 signed this for another request"),
        (lambda r, s: r.update(statements=[]), "no host signed anything"),
        (lambda r, s: r.update(missing=["host x is lost"]), "host x is lost"),
        (
            lambda r, s: signed_anew(r["statements"][0], s.keys("host-1"), sent="00" * 32),
            "what host host-1 signed that it sent is not what host host-2 signed that it received: one of them is",
        ),
        (
            lambda r, s: signed_anew(r["statements"][0], s.keys("host-1"), unix_s=0),
            "its certificate was not valid then",
        ),
        (lambda r, s: signed_anew(r["statements"][0], s.keys("host-2")), "host host-2 signed a statement of another"),
        (lambda r, s: signed_anew(r["statements"][0], s.keys("router")), "no host of this authority"),
        (
            lambda r, s: signed_anew(r["statements"][0], s.others.issue(HOST, "host-1", force=True)),
            "no host of this authority",
        ),
        (lambda r, s: signed_anew(r["statements"][0], s.keys("host-1"), blocks=["x"]), "no statement of a host's"),
    ],
)
def test_a_receipt_that_does_not_hold(signed: Signed, onesweep: Run, change: Change, said: str) -> None:
    file = written(signed, onesweep, "--mode", "ar", "--max-bytes", 12, "--temperature", 0.7)
    record = json.loads(file.read_text())
    change(record, signed)
    file.write_text(json.dumps(record))
    code, out, err = onesweep("receipt", "check", file, "--ca", signed.ca)
    assert (code, out) == (1, "")
    assert said in err


def test_a_second_run_finds_a_router_that_told_the_hosts_another_text(signed: Signed, onesweep: Run) -> None:
    file = written(signed, onesweep, "--mode", "sweep", "--max-bytes", 12)
    record = json.loads(file.read_text())
    changed_text(record, signed)
    text = hashlib.sha256(bytes.fromhex(record["text_hex"])).hexdigest()
    record["claim"] = json.dumps({**json.loads(record["claim"]), "text": text})
    claim = hashlib.sha256(record["claim"].encode()).hexdigest()
    for each in record["statements"]:
        signed_anew(each, signed.keys(json.loads(each["content"])["host"]), claim=claim)
    file.write_text(json.dumps(record))
    assert onesweep("receipt", "check", file, "--ca", signed.ca)[0] == 0
    code, _, err = onesweep("receipt", "check", file, "--ca", signed.ca, "--against", signed.second)
    assert (code, "run again, the request gives another text" in err) == (1, True)


def test_who_asks_for_what_cannot_be_signed_or_read(
    signed: Signed, deployment: Any, onesweep: Run, tmp_path: Path
) -> None:
    file, plain = tmp_path / "receipt.json", ("generate", "x", "--router", deployment.topology.router, "--receipt")
    code, _, err = onesweep(*plain, file, "--mode", "ar")
    assert (code, "hosts sign receipts with the keys of their certificates" in err) == (2, True)
    secure = ("generate", "x", "--router", signed.topology.router, "--tls-ca", signed.ca, "--receipt")
    assert onesweep(*secure, file, "--mode", "local")[0] == 2
    assert onesweep(*secure, tmp_path / "none" / "x", "--mode", "ar")[0] == 2
    for text in ("[]", "{", "{}", '{"text_hex": ""}', "[" * 100_000):
        file.write_text(text)
        code, _, err = onesweep("receipt", "check", file, "--ca", signed.ca)
        assert (code, "is no receipt" in err) == (2, True)
