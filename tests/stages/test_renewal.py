"""Certificates that change under a running server."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from stages.certificate import Certificate
from stages.errors import InputError
from stages.expiry import Expiry
from stages.identity import HOST
from stages.refusal import Refusal
from stages.relay import Relay
from stages.security import Security, ServerCertificate, Tls
from tests.stages.paris import PATIENT_S, NewPki, describe, refusal, with_relay


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


def test_a_certificate_that_is_not_valid_yet_is_looked_at_again(
    new_pki: NewPki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
        patch.setattr("stages.security.examine", refuse)
        assert server.renewed() is None
        assert server.renewed() is None
        assert expiry.unix_s() is None
    said = [record.message for record in caplog.records if record.name == "stages.security"]
    assert said == ["new certificate not taken: it is not valid yet"], "once"
    assert server.renewed() is not None
    assert server.renewed() is None, "it is taken once"
    assert expiry.unix_s() is not None

    async def renewed_relay() -> None:
        relay = Relay("127.0.0.1:9", 4 << 20, PATIENT_S, "paris", Security(relay_like))
        first = relay.channel
        pki.authority.renew("tokyo", 9)
        with monkeypatch.context() as patch:
            patch.setattr("stages.security.examine", refuse)
            relay._renew()
            assert relay.channel is first
        relay._renew()
        assert relay.channel is not first
        await relay.close()

    asyncio.run(renewed_relay())


def test_an_expired_one_is_replaced_under_a_running_server(new_pki: NewPki, monkeypatch: pytest.MonkeyPatch) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with monkeypatch.context() as patch:
        patch.setattr("stages.security.examine", lambda *paths: None)
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
        except Refusal:
            await asyncio.sleep(0.05)


def test_a_relay_shows_its_new_certificate(new_pki: NewPki, monkeypatch: pytest.MonkeyPatch) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with monkeypatch.context() as patch:
        patch.setattr("stages.security.examine", lambda *paths: None)
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
