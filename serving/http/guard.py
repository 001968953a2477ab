"""Who may call: no other site's page, and nobody by a name that is not ours."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from serving.http.errors import ApiError

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SECURITY_HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Of every answer."""


@dataclass(frozen=True)
class Guard:
    """Checks the headers of a request.

    A page of another site can make a browser call us, and by DNS rebinding even under a name of its own that means this
    machine. Addresses cannot be rebound, so they pass; of names, only those that we know.
    """

    names: frozenset[str] = frozenset()

    def check(self, method: str, headers: Headers) -> None:
        """Raises ApiError: 403 for a wrong name or another site, 415 for a body that is not JSON."""
        host = headers.get("host", "")
        name = host_name(host)
        if name is None or not (name == "localhost" or name in self.names or _is_address(name)):
            raise ApiError(
                403,
                "this server is not known by the name in the Host header: use its address or localhost, "
                "or start it with --allow-host NAME",
                code="unknown_host",
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            raise ApiError(403, "a page of another site may not call this server", code="cross_origin")
        # a form or a plain-text request needs no permission from us to be sent by another site's page
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: send it with Content-Type: application/json")


def host_name(host: str) -> str | None:
    """The name or address in a Host header, lower-case; None where it is none."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", host)
    return match[1].strip("[]").rstrip(".").lower() if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
