"""Who gets through to a stage server, and what is said of a handshake that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from stages.errors import InputError
from stages.handshake import handshake_problem
from stages.identity import CLIENT, HOST, ROUTER
from stages.security import Security, Tls
from tests.stages.paris import NewPki, describe, refusal, with_relay


@pytest.mark.parametrize(("listen", "dial"), [("127.0.0.1", ""), ("[::1]", ""), ("127.0.0.1", "localhost")])
def test_hosts_and_routers_get_through(new_pki: NewPki, listen: str, dial: str) -> None:
    pki = new_pki("a")
    for tls in (pki.issue(HOST, "tokyo"), pki.issue(ROUTER, "router")):
        assert with_relay(pki.issue(HOST, "paris", force=True), tls, describe, listen, dial) == "paris"


# Handshakes that fail


def own_expired(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    return pki.issue(HOST, "paris"), pki.expire(pki.issue(HOST, "tokyo"))


def no_certificate(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    paris = pki.issue(HOST, "paris")
    return paris, Tls(paris.authority)


def other_authority_here(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    foreign = other.issue(HOST, "tokyo")
    return pki.issue(HOST, "paris"), Tls(pki.authority.directory / "ca.pem", foreign.certificate, foreign.key)


def other_authority_there(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    return other.issue(HOST, "paris"), pki.issue(HOST, "tokyo")


def expired_there(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    paris = pki.issue(HOST, "paris")
    return pki.expire(paris), pki.issue(HOST, "tokyo")


def other_address_there(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    return pki.issue(HOST, "paris", ("10.8.0.1", "paris.example.org")), pki.issue(HOST, "tokyo")


def client_serves(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    return pki.issue(CLIENT, "paris"), pki.issue(HOST, "tokyo")


def plain_there(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    return None, pki.issue(HOST, "tokyo")


def plain_here(pki: Any, other: Any) -> tuple[Tls | None, Tls | None]:
    return pki.issue(HOST, "paris"), None


@pytest.mark.parametrize(
    ("sides", "says"),
    [
        (no_certificate, "in the handshake: it wants a certificate, as hosts do"),
        (other_authority_there, "showed a certificate of another authority than --tls-ca: give both sides the same"),
        (expired_there, "showed a certificate that has expired: renew it there"),
        (other_address_there, "showed a certificate for another address: make it anew with --address"),
        (client_serves, "showed a certificate that is not for servers"),
        (plain_there, "does not speak TLS"),
        (plain_here, "closed the connection: if it speaks TLS, give --tls-ca"),
    ],
)
def test_a_handshake_that_fails_says_why(
    new_pki: NewPki, monkeypatch: pytest.MonkeyPatch, sides: Callable[..., tuple[Tls | None, Tls | None]], says: str
) -> None:
    server_tls, tls = sides(new_pki("a"), new_pki("b"))
    monkeypatch.setattr("stages.security.examine", lambda *paths: None)  # servers start with whatever they have
    refused = with_relay(server_tls, tls, refusal)
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.message.startswith("host paris at 127.0.0.1:")
    assert says in refused.message


@pytest.mark.parametrize(
    ("sides", "says"),
    [(own_expired, "tokyo.pem is refused: it has expired"), (other_authority_here, "it is not of the authority in")],
)
def test_what_nobody_would_take_is_not_shown_at_all(new_pki: NewPki, sides: Callable[..., Any], says: str) -> None:
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
