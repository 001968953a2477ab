"""TLS of stage servers: certificates, and errors of failed handshakes."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from stages.errors import InputError
from stages.wire.auth import CLIENT, HOST, ROUTER
from stages.wire.hop_stream import Relay
from stages.wire.status import StatusError
from stages.wire.tls import Security, Tls, handshake_problem
from tests.conftest import NAMES
from tests.stages.fake_stage_server import PATIENT_S, NewPki, describe, refusal, with_relay


@pytest.mark.parametrize(("listen", "dial"), [("127.0.0.1", ""), ("[::1]", ""), ("127.0.0.1", "localhost")])
def test_hosts_and_routers_connect(new_pki: NewPki, listen: str, dial: str) -> None:
    pki = new_pki("a")
    for tls in (pki.issue(HOST, "tokyo"), pki.issue(ROUTER, "router")):
        assert with_relay(pki.issue(HOST, "paris", force=True), tls, describe, listen, dial) == "paris"


# Handshakes that fail
Sides = Callable[[Any, Any], tuple[Tls | None, Tls | None]]


def paris(pki: Any, *addresses: str) -> Tls:
    return pki.issue(HOST, "paris", addresses or NAMES)


def tokyo(pki: Any) -> Tls:
    return pki.issue(HOST, "tokyo")


@pytest.mark.parametrize(
    ("sides", "says"),
    [
        (lambda a, _: (paris(a), Tls(tokyo(a).authority)), "if it still runs, it needs a certificate, as hosts do"),
        (lambda a, b: (paris(b), tokyo(a)), "from another authority than --tls-ca: give both sides the same"),
        (lambda a, _: (a.expire(paris(a)), tokyo(a)), "presented an expired certificate: check the clocks, or"),
        (lambda a, _: (paris(a, "10.8.0.1"), tokyo(a)), "for another address: make it again with --address"),
        (lambda a, _: (a.issue(CLIENT, "paris"), tokyo(a)), "presented a certificate not meant for servers"),
        (lambda a, _: (None, tokyo(a)), "does not speak TLS"),
        (lambda a, _: (paris(a), None), "if it still runs, it speaks TLS: give --tls-ca"),
    ],
    ids=["no certificate", "other authority", "expired", "other address", "client serves", "plain there", "plain here"],
)
def test_a_failed_handshake_is_explained(new_pki: NewPki, monkeypatch, sides: Sides, says: str) -> None:
    server_tls, tls = sides(new_pki("a"), new_pki("b"))
    monkeypatch.setattr("stages.wire.tls.examine", lambda *paths: None)  # servers start with whatever they have
    refused = with_relay(server_tls, tls, refusal)
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.message.startswith("host paris at 127.0.0.1:")
    assert says in refused.message


def test_an_unusable_certificate_is_refused_before_the_handshake(new_pki: NewPki) -> None:
    here, foreign = paris(new_pki("a")), tokyo(new_pki("b"))
    with pytest.raises(InputError, match="it was not issued by the authority in"):
        with_relay(here, Tls(here.authority, foreign.certificate, foreign.key), describe)


def test_a_connection_lost_later_is_not_a_handshake_error() -> None:
    assert handshake_problem("Socket closed", Security()) == ""
    assert handshake_problem("failed to connect to all addresses; last error: Connection refused", Security()) == ""


# Files of certificates and keys that cannot be used.
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda tls: tls.key.unlink(), r"cannot read .*paris\.key: No such file"),
        (lambda tls: tls.key.chmod(0o644), r"paris\.key is a secret, but others can read or change it: chmod 600 "),
        (lambda tls: tls.authority.write_text("x"), r"ca\.pem is not a CA certificate \(PEM\)"),
        (
            lambda tls: tls.certificate.write_bytes(tls.certificate.read_bytes().replace(b"M", b"N")),
            r"paris\.pem and .*paris\.key cannot be used",
        ),
    ],
)
def test_unusable_certificate_files_are_refused(new_pki: NewPki, harm: Callable[[Tls], object], says: str) -> None:
    harm(tls := paris(new_pki("a")))
    with pytest.raises(InputError, match=says):
        tls.read()


def test_a_server_needs_a_certificate_of_its_role_and_its_own_key(new_pki: NewPki) -> None:
    pki = new_pki("a")
    paris, tokyo, router = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo"), pki.issue(ROUTER, "r")
    with pytest.raises(InputError, match=r"tokyo\.key is not the key of .*paris\.pem"):
        Tls(paris.authority, paris.certificate, tokyo.key).read()
    with pytest.raises(
        InputError, match=r"r\.pem is for onesweep://router/r: make one with `onesweep certs issue host"
    ):
        router.own(HOST)
    with pytest.raises(InputError, match="a server needs a certificate"):
        Tls(router.authority).own(HOST)


# Certificates that change under a running server.
def test_a_running_server_loads_a_new_certificate(new_pki: NewPki, caplog: pytest.LogCaptureFixture) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    caplog.set_level(logging.INFO)

    async def story(relay: Relay) -> None:
        async def open_relay() -> Relay:
            return Relay(relay.address, 4 << 20, PATIENT_S, "paris", Security(tokyo))

        assert await describe(relay) == "paris"
        good = paris.certificate.read_bytes()
        assert "valid" not in caplog.text

        paris.certificate.write_bytes(good[:200])  # a copy that is under way
        second = await open_relay()
        assert await describe(second) == "paris", "the old one serves until the new one is whole"
        await second.close()
        assert "new certificate rejected" in caplog.text

        pki.issue(HOST, "paris", force=True)
        third = await open_relay()
        assert await describe(third) == "paris"
        await third.close()
        assert "new certificate" in caplog.text
        assert "valid until" in caplog.text

    with_relay(paris, tokyo, story)


async def until_described(relay: Relay) -> str:
    """gRPC waits a moment before it tries an address again that just failed."""
    while True:
        try:
            return await describe(relay)
        except StatusError:
            await asyncio.sleep(0.05)


def test_a_relay_presents_its_new_certificate(new_pki: NewPki, monkeypatch: pytest.MonkeyPatch) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with monkeypatch.context() as patch:
        patch.setattr("stages.wire.tls.examine", lambda *paths: None)
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
            for _ in range(2):  # at the second, the first of all has no calls any more
                pki.authority.renew("tokyo", 9)
                relay._renew()
            assert before not in relay._former
            return await describe(relay)

        assert with_relay(paris, tokyo, story) == "paris"


def test_certificates_of_a_replaced_authority_are_refused(new_pki: NewPki) -> None:
    """A stolen key is shut out by a new authority on all hosts, with certificates of it."""
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
    assert "from another authority" in with_relay(paris, thief, story)
