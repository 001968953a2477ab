"""Hops at a stage server: routers, senders, leases, and the limit of a message."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from serving.cli.ports import free_port_block
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from stages.v1 import stage_pb2
from stages.wire.auth import HOST, ROUTER
from stages.wire.channel import open_blocking_channel
from stages.wire.tls import Security
from tests.conftest import NAMES, refused, until
from tests.stages.raw_client import Peer, peer, sweep


def test_an_unknown_router_must_subscribe(alone: Peer, digest: str, name: str) -> None:
    request = sweep(digest, name)
    request.router = "somebody"
    error = alone.refusal(request)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "'somebody' has not subscribed to this host: subscribe first" in error.details()


def test_a_message_over_the_limit_is_refused(alone: Peer, digest: str, name: str) -> None:
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
        alone.push(sweep(digest, name, estimate=bytes(8 << 20)))
    alone.push(sweep(digest, name))
    assert alone.event().session == name, "a new stream is served"
    alone.release(name)


def test_an_idle_session_is_freed(bundles: Path, servers: Any) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (0, 1, 2), address, None, lease_s=2.0)
    with peer(address) as host:
        until(lambda: host.describe().ready)
        host.subscribe()
        host.push(sweep(host.describe().releases[-1].chain.digest))
        assert len(host.event().text) == 16
        assert host.describe().counters.sessions == 1
        until(lambda: host.describe().counters.sessions == 0)


def test_sessions_end_with_their_router(bundles: Path, alone: Peer, digest: str, name: str) -> None:
    gone = alone.stub.Subscribe(stage_pb2.SubscribeRequest(router="gone"))
    next(gone)
    request = sweep(digest, name)
    request.router = "gone"
    alone.push(request)
    assert [len(event.text) for event in next(gone).events] == [16]
    assert alone.describe().counters.sessions == 1
    gone.cancel()
    until(lambda: alone.describe().counters.sessions == 0)


def test_a_session_takes_hops_of_its_own_router_path_and_host(bundles: Path, new_pki: Any, servers: Any) -> None:
    pki, address = new_pki("a"), f"127.0.0.1:{free_port_block(1)}"
    host = HostSettings("alone")
    own = Security(pki.issue(HOST, "alone"))
    servers.run(StageServer(StageSettings(bundles / "own", (0, 1, 2), address, (), host, threads=1, security=own)).run)
    with ExitStack() as stack:

        def caller(role: str, name: str, *addresses: str) -> Peer:
            tls = pki.issue(role, name, addresses or NAMES)
            opened = open_blocking_channel(address, security=Security(tls))
            return Peer(address, stack.enter_context(opened))

        router, rival, paris, tokyo = (
            caller(*who) for who in ((ROUTER, "r.w"), (ROUTER, "r"), (HOST, "p"), (HOST, "t"))
        )
        stranger = caller(HOST, "stranger", "127.0.0.9")
        until(lambda: router.describe().ready)
        events = router.stub.Subscribe(stage_pb2.SubscribeRequest(router="r.w.1"))
        next(events)
        digest, text = router.describe().releases[-1].chain.digest, b"The sea "

        def refusal(sender: Peer, path: str = address) -> str:
            hop = sweep(digest, number=number, start=8 * number, clean=text, slots=4)
            hop.router, hop.path[:] = "r.w.1", [path]
            rejections = sender.send(hop).rejections
            return rejections[0].message if rejections else ""

        number = 0
        assert refusal(stranger).endswith("for 127.0.0.9: not for a host on this hop's path")
        assert refusal(rival).endswith("r.w.1 is another router")
        assert refusal(router) == ""
        number, text = 1, b"and more"
        assert refusal(stranger, "127.0.0.9:1").endswith("another router or path")
        assert rival.stub.Release(stage_pb2.ReleaseRequest(sessions=["s"])).released == 0
        assert refusal(paris) == ""
        number = 2
        assert refusal(tokyo) == "this session's hops must come from p"
        assert refusal(paris) == ""
        events.cancel()
