"""Settings of the HTTP gateway, which define the flags of `onesweep http`."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from serving.client.failover import router_addresses
from serving.router.request import DEFAULT_ROUTER, MAX_TIMEOUT_S, ROUTER_HELP
from stages.errors import InputError
from stages.settings import setting
from stages.telemetry.observability import UNOBSERVED, ObservabilitySettings
from stages.wire.channel import DRAIN_S, KEEP_ALIVE_S, is_loopback, parse_address
from stages.wire.tls import Tls

DEFAULT_LISTEN = "127.0.0.1:7780"


@dataclass(frozen=True)
class HttpSettings:
    """Settings of a gateway. Raises InputError for bad values."""

    listen: str = setting(DEFAULT_LISTEN, "", metavar="HOST:PORT")
    router: str = setting(DEFAULT_ROUTER, ROUTER_HELP, shown="", metavar="HOST:PORT")
    tls_cert: Path | None = setting(None, "serve HTTPS: certificate chain, PEM")
    tls_key: Path | None = setting(None, "its key, PEM")
    # None: plain text to the router.
    router_tls: Tls | None = setting(
        None,
        "certificate authority of the router, PEM",
        name="--tls-ca",
        metavar="FILE",
        type=lambda path: Tls(Path(path)),
    )
    insecure: bool = setting(False, "allow plain text on an address that others can reach")
    # Names allowed in a request's Host header, in addition to `localhost` and addresses.
    allow_hosts: tuple[str, ...] = setting(
        (), "a host name of this server; repeat", name="--allow-host", metavar="NAME", action="append"
    )
    timeout_s: float = setting(120.0, "of requests without one", above=0, maximum=MAX_TIMEOUT_S, rare=True)
    seeing: ObservabilitySettings = UNOBSERVED
    keep_alive_s: int = setting(KEEP_ALIVE_S, "an idle connection is closed after", minimum=1, rare=True)
    drain_s: float = setting(DRAIN_S, "time for running answers to finish", above=0, rare=True)

    def __post_init__(self) -> None:
        parse_address(self.listen, "listen address")
        router_addresses(self.router)
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

    @property
    def url(self) -> str:
        """The address for a browser on this machine."""
        return f"{'https' if self.tls_cert else 'http'}://{self.listen}"


def check_framework(what: str) -> None:
    """Raise InputError unless the extra `http` is installed."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise InputError(f"{what} needs fastapi and uvicorn: pip install 'onesweep[http]'")
