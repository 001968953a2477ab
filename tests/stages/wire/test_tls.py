"""Who gets through to a stage server, and what is said of a handshake that fails."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from onesweep.stages.errors import InputError
from onesweep.stages.wire.auth import CLIENT, HOST, ROUTER, Identity
from onesweep.stages.wire.hop_stream import Relay
from onesweep.stages.wire.status import StatusError
from onesweep.stages.wire.tls import Certificate, Expiry, Security, ServerCertificate, Tls, handshake_problem
from tests.stages.fake_stage_server import PATIENT_S, NewPki, describe, refusal, with_relay


@pytest.mark.parametrize(("listen", "dial"), [("127.0.0.1", ""), ("[::1]", ""), ("127.0.0.1", "localhost")])
def test_hosts_and_routers_get_through(new_pki: NewPki, listen: str, dial: str) -> None:
    pki = new_pki("a")
    for tls in (pki.issue(HOST, "tokyo"), pki.issue(ROUTER, "router")):
        assert with_relay(pki.issue(HOST, "paris", force=True), tls, describe, listen, dial) == "paris"


# Handshakes that fail
Sides = Callable[[Any, Any], tuple[Tls | None, Tls | None]]


def other_authority_here(pki: Any, other: Any) -> tuple[Tls, Tls]:
    foreign = other.issue(HOST, "tokyo")
    return pki.issue(HOST, "paris"), Tls(pki.authority.directory / "ca.pem", foreign.certificate, foreign.key)


@pytest.mark.parametrize(
    ("sides", "says"),
    [
        (
            lambda pki, other: (paris := pki.issue(HOST, "paris"), Tls(paris.authority)),
            "in the handshake: it wants a certificate, as hosts do",
        ),
        (
            lambda pki, other: (other.issue(HOST, "paris"), pki.issue(HOST, "tokyo")),
            "showed a certificate of another authority than --tls-ca: give both sides the same",
        ),
        (
            lambda pki, other: (pki.expire(pki.issue(HOST, "paris")), pki.issue(HOST, "tokyo")),
            "showed a certificate that has expired: renew it there",
        ),
        (
            lambda pki, other: (pki.issue(HOST, "paris", ("10.8.0.1", "paris.example.org")), pki.issue(HOST, "tokyo")),
            "showed a certificate for another address: make it anew with --address",
        ),
        (
            lambda pki, other: (pki.issue(CLIENT, "paris"), pki.issue(HOST, "tokyo")),
            "showed a certificate that is not for servers",
        ),
        (lambda pki, other: (None, pki.issue(HOST, "tokyo")), "does not speak TLS"),
        (lambda pki, other: (pki.issue(HOST, "paris"), None), "closed the connection: if it speaks TLS, give --tls-ca"),
    ],
    ids=["no certificate", "other authority", "expired", "other address", "client serves", "plain there", "plain here"],
)
def test_a_handshake_that_fails_says_why(new_pki: NewPki, monkeypatch, sides: Sides, says: str) -> None:
    server_tls, tls = sides(new_pki("a"), new_pki("b"))
    monkeypatch.setattr(
        "onesweep.stages.wire.tls.examine", lambda *paths: None
    )  # servers start with whatever they have
    refused = with_relay(server_tls, tls, refusal)
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.message.startswith("host paris at 127.0.0.1:")
    assert says in refused.message


@pytest.mark.parametrize(
    ("sides", "says"),
    [
        (
            lambda pki, other: (pki.issue(HOST, "paris"), pki.expire(pki.issue(HOST, "tokyo"))),
            "tokyo.pem is refused: it has expired",
        ),
        (other_authority_here, "it is not of the authority in"),
    ],
    ids=["expired", "other authority"],
)
def test_what_nobody_would_take_is_not_shown_at_all(new_pki: NewPki, sides: Sides, says: str) -> None:
    server_tls, tls = sides(new_pki("a"), new_pki("b"))
    with pytest.raises(InputError, match=says):
        with_relay(server_tls, tls, describe)


def test_two_authorities_while_one_replaces_the_other(new_pki: NewPki) -> None:
    pki, other = new_pki("a"), new_pki("b")
    both = pki.authority.directory / "both.pem"
    both.write_bytes(b"".join((p.authority.directory / "ca.pem").read_bytes() for p in (pki, other)))
    paris, tokyo = pki.issue(HOST, "paris"), other.issue(HOST, "tokyo")
    server, caller = (Tls(both, tls.certificate, tls.key) for tls in (paris, tokyo))
    assert with_relay(server, caller, describe) == "paris"


def test_a_certificate_that_the_other_side_does_not_take(new_pki: NewPki) -> None:
    """Two authorities under one name each trusts its own: only the server knows that the handshake failed."""
    pki, other = new_pki("a"), new_pki("b")
    both = pki.authority.directory / "both.pem"
    both.write_bytes(b"".join((p.authority.directory / "ca.pem").read_bytes() for p in (pki, other)))
    foreign = other.issue(HOST, "tokyo")
    refused = with_relay(pki.issue(HOST, "paris"), Tls(both, foreign.certificate, foreign.key), refusal)
    assert "its authority is probably not that of" in refused.message
    assert refused.code is grpc.StatusCode.UNAVAILABLE


def test_a_connection_that_breaks_later_is_no_handshake() -> None:
    assert handshake_problem("Socket closed", Security()) == ""
    assert handshake_problem("failed to connect to all addresses; last error: Connection refused", Security()) == ""


# Files of certificates and keys that cannot be used.
def broken(tls: Tls, how: str) -> Tls:
    if how == "missing":
        tls.key.unlink()
    elif how == "readable":
        tls.key.chmod(0o644)
    elif how == "group may write":
        tls.key.chmod(0o660)
    elif how == "swapped":
        return Tls(tls.authority, tls.key, tls.certificate)
    elif how == "garbage":
        tls.authority.write_text("x")
    elif how == "damaged":
        tls.certificate.write_bytes(tls.certificate.read_bytes().replace(b"M", b"N"))
    return tls


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", r"cannot read .*paris\.key: No such file"),
        ("readable", r"paris\.key is a secret, and others can read or change it: chmod 600 "),
        ("group may write", r"paris\.key is a secret"),
        ("garbage", r"ca\.pem is no authority's certificate \(PEM\)"),
        ("damaged", r"paris\.pem and .*paris\.key cannot be used"),
    ],
)
def test_files_that_cannot_be_used(new_pki: NewPki, how: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        broken(new_pki("a").issue(HOST, "paris"), how).read()


def test_files_in_each_others_place(new_pki: NewPki) -> None:
    tls = new_pki("a").issue(HOST, "paris")
    tls.certificate.chmod(0o600)
    with pytest.raises(InputError, match=r"paris\.key is no certificate"):
        broken(tls, "swapped").read()
    with pytest.raises(InputError, match=r"paris\.pem is no private key"):
        Tls(tls.authority, tls.certificate, tls.certificate).read()


def test_a_group_may_read_a_key(new_pki: NewPki) -> None:
    tls = new_pki("a").issue(HOST, "paris")
    tls.key.chmod(0o640)
    assert tls.own(HOST).identity == Identity(HOST, "paris")


def test_a_key_of_another_certificate(new_pki: NewPki) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with pytest.raises(InputError, match=r"tokyo\.key is not the key of .*paris\.pem"):
        Tls(paris.authority, paris.certificate, tokyo.key).read()


def test_a_key_with_a_password(new_pki: NewPki) -> None:
    from cryptography.hazmat.primitives import serialization as s

    tls = new_pki("a").issue(HOST, "paris")
    key = s.load_pem_private_key(tls.key.read_bytes(), None)
    raw = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x"))
    tls.key.write_bytes(raw)
    with pytest.raises(InputError, match=r"paris\.key has a password"):
        tls.read()


def test_half_a_pair() -> None:
    with pytest.raises(InputError, match="give both --tls-cert and --tls-key, or neither"):
        Tls(Path("ca.pem"), Path("a.pem"))


def test_a_server_needs_a_certificate_of_its_role(new_pki: NewPki) -> None:
    pki = new_pki("a")
    router = pki.issue(ROUTER, "r")
    with pytest.raises(InputError, match=r"r\.pem is for onesweep://router/r: make one with `onesweep certs host"):
        router.own(HOST)
    with pytest.raises(InputError, match="a server needs a certificate"):
        Tls(router.authority).own(HOST)


# Certificates that change under a running server.
def test_a_running_server_takes_a_new_certificate(new_pki: NewPki, caplog: pytest.LogCaptureFixture) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    caplog.set_level(logging.INFO)

    async def story(relay: Relay) -> None:
        async def anew() -> Relay:
            return Relay(relay.address, 4 << 20, PATIENT_S, "paris", Security(tokyo))

        assert await describe(relay) == "paris"
        good = paris.certificate.read_bytes()
        assert "valid" not in caplog.text

        paris.certificate.write_bytes(good[:200])  # a copy that is under way
        second = await anew()
        assert await describe(second) == "paris", "the old one serves until the new one is whole"
        await second.close()
        assert "new certificate not taken" in caplog.text

        pki.issue(HOST, "paris", force=True)
        third = await anew()
        assert await describe(third) == "paris"
        await third.close()
        assert "new certificate" in caplog.text
        assert "valid until" in caplog.text

    with_relay(paris, tokyo, story)


async def test_a_certificate_that_is_not_valid_yet_is_looked_at_again(new_pki: NewPki, monkeypatch, caplog) -> None:
    """Its file does not change when its time comes."""
    pki = new_pki("a")
    paris = pki.issue(HOST, "paris")
    server = ServerCertificate(paris, mutual=True)
    expiry = Expiry(paris)
    relay_like = pki.issue(HOST, "tokyo")
    before = paris.stamp()
    pki.authority.renew("paris", 9)
    assert paris.stamp() != before

    def refuse(*paths: Path) -> Certificate:
        raise InputError("it is not valid yet")

    with monkeypatch.context() as patch:
        patch.setattr("onesweep.stages.wire.tls.examine", refuse)
        assert server.renewed() is None
        assert server.renewed() is None
        assert expiry.unix_s() is None
    said = [record.message for record in caplog.records if record.name == "onesweep.stages.wire.tls"]
    assert said == ["new certificate not taken: it is not valid yet"], "once"
    assert server.renewed() is not None
    assert server.renewed() is None, "it is taken once"
    assert expiry.unix_s() is not None
    relay = Relay("127.0.0.1:9", 4 << 20, PATIENT_S, "paris", Security(relay_like))
    first = relay.channel
    pki.authority.renew("tokyo", 9)
    with monkeypatch.context() as patch:
        patch.setattr("onesweep.stages.wire.tls.examine", refuse)
        relay._renew()
        assert relay.channel is first
    relay._renew()
    assert relay.channel is not first
    await relay.close()


def test_an_expired_one_is_replaced_under_a_running_server(new_pki: NewPki, monkeypatch: pytest.MonkeyPatch) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with monkeypatch.context() as patch:
        patch.setattr("onesweep.stages.wire.tls.examine", lambda *paths: None)
        pki.expire(paris)
        shown = paris.certificate.read_bytes()

        async def story(relay: Relay) -> str:
            assert "has expired" in (await refusal(relay)).message
            patch.undo()
            pki.authority.renew("paris", 9)
            assert paris.certificate.read_bytes() != shown
            return await until_described(relay)

        assert with_relay(paris, tokyo, story) == "paris"


async def until_described(relay: Relay) -> str:
    """gRPC waits a moment before it tries an address again that just failed."""
    while True:
        try:
            return await describe(relay)
        except StatusError:
            await asyncio.sleep(0.05)


def test_a_relay_shows_its_new_certificate(new_pki: NewPki, monkeypatch: pytest.MonkeyPatch) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with monkeypatch.context() as patch:
        patch.setattr("onesweep.stages.wire.tls.examine", lambda *paths: None)
        pki.expire(tokyo)

        async def story(relay: Relay) -> str:
            patch.undo()
            before = relay.channel
            refused = await refusal(relay)
            assert "tokyo.pem is refused: it has expired" in refused.message
            assert relay.channel is before, "nothing has changed yet"
            pki.authority.renew("tokyo", 9)
            assert await until_described(relay) == "paris"
            assert relay.channel is not before
            return await describe(relay)

        assert with_relay(paris, tokyo, story) == "paris"


def test_a_new_authority_ends_the_old_certificates(new_pki: NewPki) -> None:
    """How a key that was stolen is shut out: hosts get a new authority, and certificates of it."""
    pki, other = new_pki("a"), new_pki("b")
    paris, thief = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    fresh = other.issue(HOST, "paris")

    async def story(relay: Relay) -> str:
        assert await describe(relay) == "paris"
        for old, new in zip(
            (paris.key, paris.certificate, paris.authority),
            (fresh.key, fresh.certificate, fresh.authority),
            strict=True,
        ):
            shutil.copy(new, old)
        stolen = Tls(thief.authority.with_name("old.pem"), thief.certificate, thief.key)
        again = Relay(relay.address, 4 << 20, PATIENT_S, "paris", Security(stolen))
        try:
            return (await refusal(again)).message
        finally:
            await again.close()

    shutil.copy(thief.authority, thief.authority.with_name("old.pem"))
    assert "of another authority" in with_relay(paris, thief, story)
