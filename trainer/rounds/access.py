"""Who may work for a coordinator, under which names, and who may look: by a token, or by the certificate they show."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from stages.errors import InputError
from stages.guard import identity_of
from stages.identity import CLIENT
from stages.refusal import Refusal
from stages.security import Security
from stages.tokens import Keyring
from stages.transport import is_loopback, parse_address

Context = grpc.aio.ServicerContext[Any, Any]


class Access:
    """With a token file, tokens decide; else certificates, where callers must show them; else anybody may."""

    def __init__(self, keyring: Keyring, mutual: bool) -> None:
        """:param mutual: whether every caller has shown a certificate of our authority."""
        self.keyring, self.mutual = keyring, mutual

    def check_scope(self, context: Context, scope: str) -> str | None:
        """The name of who calls, None for anybody. Raises Refusal."""
        if not self.keyring.open:
            return self.keyring.identify(context.invocation_metadata(), scope).name
        if not self.mutual:
            return None
        identity = identity_of(context)
        if identity is None or identity.role != CLIENT:
            shown = identity.uri if identity else "of nobody that onesweep knows"
            said = f"your certificate is {shown}: a worker needs one of role client (`onesweep certs client NAME`)"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, said)
        return identity.name

    def check_worker(self, context: Context, scope: str, worker: str) -> None:
        """Raise Refusal unless who calls may do so as `worker`."""
        name = self.check_scope(context, scope)
        if name is not None and worker != name and not worker.startswith(f"{name}."):
            said = f"you are {name}: you may work as {name} or {name}.SOMETHING only, not as {worker[:80]!r}"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, said)


def check_page(listen: str, security: Security, keyring: Keyring) -> None:
    """Raise InputError unless the page may be served there: on loopback, else over TLS and to those with tokens."""
    parse_address(listen, "--page")
    if is_loopback(listen):
        return
    if security.tls is None and not security.insecure:
        raise InputError(
            f"--page {listen} can be reached from other machines and traffic is not encrypted: give --tls-ca, "
            "--tls-cert and --tls-key, serve it on loopback, or accept it with --insecure"
        )
    if security.tls is not None and keyring.open:
        raise InputError(
            f"--page {listen} can be looked at from other machines by anybody: give --tokens, or serve it on loopback"
        )
