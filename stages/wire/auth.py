"""Access to a stage server by caller: identities `onesweep://ROLE/NAME` in certificates, and each role's rights."""

import ipaddress
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from stages.v1 import stage_pb2
from stages.wire.status import Context, Interceptor, StatusError, checked_handler, permission_denied

log = logging.getLogger(__name__)

SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
SCHEME = "onesweep://"
HOST, ROUTER, CLIENT = "host", "router", "client"
ROLES = (HOST, ROUTER, CLIENT)
HOST_METHODS = frozenset({"Describe", "Push", "Warm"})  # calls between hosts; all others are for routers


@dataclass(frozen=True)
class Identity:
    """The role and name in a certificate.

    As the certificate contains the role, a new host or router needs nothing else: no host keeps a list of its peers.
    """

    role: str
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"

    @classmethod
    def of(cls, names: Iterable[str]) -> Self | None:
        """The identity among a certificate's names; None if there is none, or more than one."""
        ours = [name.removeprefix(SCHEME) for name in names if name.startswith(SCHEME)]
        if len(ours) != 1:
            return None
        role, _, name = ours[0].partition("/")
        return cls(role, name) if role in ROLES and name and "/" not in name else None


def identity_of(context: Context) -> Identity | None:
    """The caller's identity, from the certificate that the handshake verified; None without a onesweep certificate."""
    names = context.auth_context().get("peer_uri")
    return Identity.of(name.decode() for name in names) if names else None


def check_sender(context: Context, peer: Identity, hop: stage_pb2.Hop) -> str:
    """The name of the host that sent a hop; empty for a router.

    :param peer: from `identity_of`. Raises StatusError unless it is the hop's own router, or a host on its path.
    """
    if peer.role == ROUTER:
        if hop.router.rpartition(".")[0] != peer.name:
            raise permission_denied(f"your certificate is {peer.uri}: {hop.router} is another router")
        return ""
    shown = context.auth_context()
    own = {_plain(name.decode()) for kind in ("peer_dns", "peer_ip") for name in shown.get(kind, ())}
    places = {_plain(address.rpartition(":")[0].strip("[]")) for address in hop.path}
    # a host's certificate contains the dialled name, perhaps as one of many
    if not own & {name for place in places for name in (place, f"*.{place.partition('.')[2]}")}:
        raise permission_denied(
            f"your certificate is {peer.uri}, for {', '.join(sorted(own))}: not for a host on this hop's path"
        )
    return peer.name


def _plain(host: str) -> str:
    """The canonical form of a name or IP address."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def check_caller(method: str, request: object, context: Context) -> None:
    """Raise StatusError unless the caller's certificate allows `method` of the stage service."""
    peer = identity_of(context)
    shown = peer.uri if peer else "not from `onesweep certs`"
    if peer is None or peer.role not in (HOST, ROUTER):
        raise permission_denied(f"your certificate is {shown}: a stage server accepts only hosts and routers")
    if peer.role == HOST and method not in HOST_METHODS:
        raise permission_denied(f"your certificate is {shown}: {method} is only for routers")
    # a router subscribes as NAME.INSTANCE: results must not reach a router of another name
    if isinstance(request, stage_pb2.SubscribeRequest) and request.router.rpartition(".")[0] != peer.name:
        raise permission_denied(f"your certificate is {shown}: you may listen only as {peer.name}.SUFFIX")


class CallerGuard(Interceptor):
    """Rejects calls of the stage service by caller. Other services of the server, such as health, are open to all whose
    handshake succeeded."""

    def __init__(self, check: Callable[[str, object, Context], object] = check_caller) -> None:
        """:param check: raises StatusError to refuse a call."""
        self._check, self._logged = check, ""

    def answered_by(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        _, service, method = str(call.method).split("/")
        if service != SERVICE:
            return handler

        def check(request: object, context: Context) -> None:
            try:
                self._check(method, request, context)
            except StatusError as refusal:
                if refusal.message != self._logged:  # a rejected peer often retries at once: one line is enough
                    log.warning("%s refused for %s: %s", method, context.peer(), refusal.message)
                self._logged = refusal.message
                raise

        return checked_handler(handler, check)
