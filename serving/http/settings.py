"""What `onesweep http` is told, and where it may listen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from serving.topology import DEFAULT_ROUTER
from stages.errors import InputError
from stages.security import Tls
from stages.seeing import SeeingSettings
from stages.transport import DRAIN_S, is_loopback, parse_address

DEFAULT_LISTEN = "127.0.0.1:7780"
DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class HttpSettings:
    """Checked when made. Raises InputError."""

    listen: str = DEFAULT_LISTEN
    router: str = DEFAULT_ROUTER
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    """Names, beside `localhost` and addresses, that a request may call this server by."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Deadline of a request that names none."""
    router_tls: Tls | None = None
    """Whose certificate of the router is believed; None = it speaks plain text."""
    seeing: SeeingSettings = field(default_factory=SeeingSettings)
    drain_s: float = DRAIN_S
    """How long a gateway that was told to stop goes on with the answers under way."""

    def __post_init__(self) -> None:
        parse_address(self.listen, "listen address")
        parse_address(self.router, "router address")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("--tls-cert and --tls-key go together: give both, or neither")
        if not is_loopback(self.listen) and not self.insecure and self.tls_cert is None:
            raise InputError(
                f"{self.listen} can be reached from other machines and traffic is not encrypted: give --tls-cert and "
                "--tls-key, listen on a loopback or tunnel address, or accept it with --insecure"
            )
        for name in self.allow_hosts:
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name):
                raise InputError(f"--allow-host {name!r} must be a name without port, such as onesweep.example.org")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise InputError(f"--timeout-s must be above 0 and at most {MAX_TIMEOUT_S:g}, not {self.timeout_s:g}")

    @property
    def url(self) -> str:
        """How a browser on this machine finds the server."""
        return f"{'https' if self.tls_cert else 'http'}://{self.listen}"
