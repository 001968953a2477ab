"""How a router is reached, by whatever process asks it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from serving.client_options import Who
from stages.errors import InputError
from stages.security import LOOPBACK_ONLY, Tls
from stages.security_options import add_client_options, security_of
from stages.token_options import token_for
from stages.transport import check_target


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """`--router`, `--tls-ca`, `--insecure`."""
    parser.add_argument("--router", metavar="HOST:PORT", help="a deployment that is there, instead of starting one")
    add_client_options(parser)


@dataclass(frozen=True)
class Access:
    """Values that JSON has, for processes that are told by it."""

    router: str
    authority: str = ""
    """File with the authority whose certificates are believed; empty: plain text."""
    insecure: bool = False
    """Whether that may leave the machine."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self | None:
        """What `add_access_options` brought; None where no router is named. Raises InputError."""
        security = security_of(options)
        if options.router is None:
            if security != LOOPBACK_ONLY:
                raise InputError("--tls-ca and --insecure go with --router: what is started here needs neither")
            return None
        check_target(options.router, security, "--router")
        return cls(options.router, str(security.tls.authority) if security.tls else "", security.insecure)

    def who(self, token: str = "") -> Who:
        """Settings of a client.

        :param token: who asks; empty: whoever $ONESWEEP_TOKEN names.
        """
        tls = Tls(Path(self.authority)) if self.authority else None
        return {"tls": tls, "token": token or token_for(self.router, tls), "insecure": self.insecure}
