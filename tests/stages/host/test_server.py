"""A stage server over gRPC: health, readiness, and its description of itself and its neighbours."""

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from stages.backends import Backend
from stages.host import loading
from stages.host.parts import Parts, load_parts
from stages.host.plan import HostPlan, plan_host, wiring_problem
from stages.v1 import stage_pb2
from stages.wire.auth import SERVICE
from tests.conftest import PATIENCE_S, until
from tests.stages.raw_client import Peer, peer, sweep


def test_a_host_is_live_at_once_and_ready_with_its_next_host(bundles: Path, servers: Any) -> None:
    port = free_port_block(2)
    first, second = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    servers.stage(bundles / "own", (0, 1), first, second)
    with peer(first) as host:
        assert host.serving("")
        until(lambda: "cannot be reached" in host.describe().not_ready_reason)
        assert host.serving("")
        assert not host.serving(SERVICE)
        assert f"the host at {second} cannot be reached (" in host.describe().not_ready_reason

        other = servers.stage(bundles / "own", (2,), second, first)
        until(lambda: host.serving(SERVICE))
        assert host.describe().ready
        other.end()
        until(lambda: not host.serving(SERVICE))
        assert f"host stage-2 at {second} cannot be reached" in host.describe().not_ready_reason
        servers.stage(bundles / "own", (2,), second, first)
        until(lambda: host.serving(SERVICE))


def test_a_host_is_not_ready_before_its_weights_are_loaded(bundles: Path, servers: Any, monkeypatch) -> None:
    begun = threading.Event()

    def load(plan: HostPlan, backend: Backend, held: Sequence[Parts]) -> Parts:
        begun.wait(PATIENCE_S)
        return load_parts(plan, backend, held)

    monkeypatch.setattr(loading, "load_parts", load)
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (0, 1, 2), address, None)
    with peer(address) as host:
        assert host.serving("")
        assert not host.serving(SERVICE)
        assert host.describe().not_ready_reason == "loading weights"
        assert host.refusal(sweep("")).code() is grpc.StatusCode.UNAVAILABLE
        begun.set()
        until(lambda: host.serving(SERVICE))


@pytest.mark.parametrize(
    ("checkpoint", "blocks", "says"),
    [
        ("other", (2,), "give every host the same checkpoint"),
        ("own", (0, 1), r"holds blocks \[0, 1\], but block 2 must come next: check the topology"),
    ],
)
def test_a_wrong_neighbour_is_named(bundles: Path, servers, checkpoint: str, blocks, says: str) -> None:
    port = free_port_block(2)
    first, second = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    servers.stage(bundles / "own", (0, 1), first, second)
    servers.stage(bundles / checkpoint, blocks, second, first, name="other")
    with peer(first) as host:
        until(lambda: re.search(says, host.describe().not_ready_reason))
        assert not host.serving(SERVICE)
        if checkpoint == "other":
            with peer(second) as neighbour:
                digests = [peer.describe().releases[-1].chain.digest[:12] for peer in (host, neighbour)]
            assert all(digest in host.describe().not_ready_reason for digest in digests)


def test_a_host_without_a_next_host_is_not_ready(bundles: Path, servers: Any) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    servers.stage(bundles / "own", (1,), address, None)
    with peer(address) as host:
        until(lambda: "no next host: the topology has none" in host.describe().not_ready_reason)


def test_wiring_is_checked_for_each_model(bundles: Path) -> None:
    plan = plan_host(bundles / "own", (0, 1))
    other = stage_pb2.DescribeResponse(name="b", blocks=[2])
    assert "b at x:1 does not report its weights" in wiring_problem([plan], "x:1", other)
    good = other.releases.add()
    good.chain.digest, good.ar.digest = plan.models["chain"].digest, plan.models["ar"].digest
    assert wiring_problem([plan], "x:1", other) == ""
    good.scorer.digest = "f" * 64
    assert "b at x:1 has the scorer checkpoint ffffffffffff, this host (none)" in wiring_problem([plan], "x:1", other)
    good.ClearField("scorer")
    good.ar.digest = ""
    assert "b at x:1 has the ar checkpoint (none), this host" in wiring_problem([plan], "x:1", other)


def test_a_host_describes_itself(alone: Peer) -> None:
    description = alone.describe()
    assert (description.name, list(description.blocks), list(description.links)) == ("alone", [0, 1, 2], [])
    (release,) = description.releases
    assert (len(release.name), release.loading) == (16, False)
    chain = release.chain
    assert (chain.parts, chain.positions, chain.width) == (3, 512, 32)
    assert description.counters.session_bytes_limit == 1 << 20


def test_a_stopping_host_exits_after_its_requests(bundles: Path, servers: Any) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    running = servers.stage(bundles / "own", (0, 1, 2), address)
    with peer(address) as host:
        until(lambda: host.describe().ready)
        host.subscribe()
        host.push(sweep(host.describe().releases[0].chain.digest))
        assert host.event().text
        running.loop.call_soon_threadsafe(running.stop.set)
        until(lambda: host.describe().not_ready_reason == "it is stopping")
        assert not running.ended.done()
        host.release("s")
        running.ended.result(PATIENCE_S)
