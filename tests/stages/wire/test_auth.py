"""Permissions by certificate: hosts, routers and clients at a stage server."""

from types import SimpleNamespace

import grpc
import pytest

from stages.v1 import stage_pb2
from stages.wire.auth import CLIENT, HOST, ROUTER, Identity, check_caller
from stages.wire.hop_stream import Relay
from stages.wire.status import StatusError
from tests.stages.fake_stage_server import PATIENT_S, NewPki, refusal, with_relay


def test_clients_are_refused_and_hosts_may_not_call_methods_of_routers(new_pki: NewPki) -> None:
    pki = new_pki("a")
    refused = with_relay(pki.issue(HOST, "paris"), pki.issue(CLIENT, "alice"), refusal)
    assert refused.code is grpc.StatusCode.PERMISSION_DENIED
    assert "onesweep://client/alice: a stage server accepts only hosts and routers" in refused.message

    async def release(relay: Relay) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await relay.stub.Release(stage_pb2.ReleaseRequest(sessions=["x"]), timeout=PATIENT_S)
        return caught.value

    error = with_relay(pki.issue(HOST, "oslo"), pki.issue(HOST, "tokyo"), release)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error.details().endswith("Release is only for routers")


def may(peer: Identity, method: str) -> bool:
    try:
        request = stage_pb2.SubscribeRequest(router="r.1") if method == "Subscribe" else None
        check_caller(method, request, SimpleNamespace(auth_context=lambda: {"peer_uri": [peer.uri.encode()]}))
    except StatusError:
        return False
    return True


def test_each_role_may_call_its_methods_only() -> None:
    methods = {m.name for m in stage_pb2.DESCRIPTOR.services_by_name["StageService"].methods}
    assert {m for m in methods if may(Identity(ROUTER, "r"), m)} == methods
    assert {m for m in methods if may(Identity(HOST, "paris"), m)} == {"Describe", "Push", "Warm"}
    assert not any(may(Identity(role, "alice"), m) for m in methods for role in (CLIENT, "king"))


@pytest.mark.parametrize(
    ("names", "identity"),
    [
        (["onesweep://host/paris"], Identity(HOST, "paris")),
        (["https://example.org", "onesweep://client/a"], Identity(CLIENT, "a")),
        ([], None),
        (["onesweep://host/a", "onesweep://router/b"], None),
        (["onesweep://king/a"], None),
        (["onesweep://host/"], None),
        (["onesweep://host/a/b"], None),
    ],
)
def test_an_identity_is_read_from_the_names_of_a_certificate(names: list[str], identity: Identity | None) -> None:
    assert Identity.of(names) == identity
    assert identity is None or identity.uri in names
