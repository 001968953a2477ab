"""Checks of a browser's Host and Origin headers, and the security headers of every page."""

import re
from collections.abc import Collection
from importlib.util import find_spec

from stages.errors import InputError
from stages.wire.channel import ip_of


def host_name(host: str) -> str | None:
    """The name or address in a Host header, lower-case; None where it is none."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", host)
    return match[1].strip("[]").rstrip(".").lower() if match else None


def is_ours(host: str, names: Collection[str] = ()) -> bool:
    """True if a Host header may name this server: any address, `localhost`, or a name in `names` (lower-case)."""
    # a page of another site can reach this machine under its own name by DNS rebinding; addresses cannot be rebound
    name = host_name(host)
    return name is not None and (name == "localhost" or name in names or ip_of(name) is not None)


def is_other_site(origin: str | None, host: str) -> bool:
    """True if an Origin header is that of another site's page."""
    return origin is not None and origin.lower().partition("://")[2] != host.lower()


# Of every answer: a page runs only its own scripts, talks only to its own server, and is in no frame.
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def check_framework(what: str) -> None:
    """Raise InputError unless the extra `http` is installed."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise InputError(f"{what} needs fastapi and uvicorn: pip install 'onesweep[http]'")
