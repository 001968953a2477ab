"""What went wrong in a TLS handshake, said so that somebody can put it right."""

from __future__ import annotations

from stages.errors import InputError
from stages.security import Security

PLAIN = "WRONG_VERSION_NUMBER"
CLOSED = ("Socket closed", "Connection reset by peer", "Broken pipe")
FIRST_CONTACT = "failed to connect"
"""What gRPC says where no connection came about, rather than that one broke."""

_SENTENCES = (
    ("certificate has expired", "showed a certificate that has expired: renew it there with `onesweep certs renew`"),
    ("not yet valid", "showed a certificate that is not valid yet: see that the clocks are right"),
    ("Hostname Verification", "showed a certificate for another address: make it anew with --address"),
    ("certificate purpose", "showed a certificate that is not for servers: make one with `onesweep certs host`"),
    ("subtree violation", "showed a certificate with a name that its authority may not give"),
    ("issuer certificate", "showed a certificate of another authority than --tls-ca: give both sides the same ca.pem"),
    (
        "certificate signature",
        "showed a certificate of another authority than --tls-ca: give both sides the same ca.pem",
    ),
    ("self-signed", "showed a certificate of another authority than --tls-ca: give both sides the same ca.pem"),
    ("self signed", "showed a certificate of another authority than --tls-ca: give both sides the same ca.pem"),
    (PLAIN, "does not speak TLS: start it with --tls-cert, or leave --tls-ca out here"),
)


def handshake_problem(details: str, security: Security) -> str:
    """What to say after the name of the other side; empty where no handshake failed.

    :param details: of a status UNAVAILABLE.
    """
    if FIRST_CONTACT not in details:
        return ""
    for mark, sentence in _SENTENCES:
        if mark in details:
            return sentence
    if "handshake failed" in details:
        return f"and this side found no common TLS ({details})"
    if any(mark in details for mark in CLOSED):
        return _after_our_part(security)
    return ""


def _after_our_part(security: Security) -> str:
    """The other side hung up once it had seen what we show: it does not say why."""
    tls = security.tls
    if tls is None:
        return "closed the connection: if it speaks TLS, give --tls-ca"
    if tls.certificate is None:
        return "closed the connection in the handshake: it wants a certificate, as hosts do; give the router's address"
    try:
        tls.read()
    except InputError as error:
        return f"closed the connection in the handshake: {error}"
    return f"closed the connection in the handshake: its authority is probably not that of {tls.certificate}"
