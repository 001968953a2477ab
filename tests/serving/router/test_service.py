"""The router's own face: health, reflection, and the demo command."""

import asyncio
import contextlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.cli.deployment import Deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client, Result, RouterError
from serving.router.active_release import ActiveRelease, RouterParts
from serving.router.host_link import ONE_AT_A_TIME
from serving.router.ring import Ring
from serving.router.server import SERVICE, first_release
from serving.router.settings import RouterSettings
from serving.router.topology import local_topology
from stages.backends import runner_checks
from stages.checkpoint.release_store import ReleaseStore, read_release_manifest
from stages.errors import InputError
from stages.wire.channel import open_blocking_channel
from stages.wire.tls import Expiry, ending
from tests.conftest import PATIENCE_S, Run, until
from tests.stages.checkpoints import put_release


def test_the_router_is_live_at_once_and_ready_with_its_hosts(bundles: Path, servers: Any) -> None:
    topology = local_topology(1, 3, bundles / "own", free_port_block(2) + 1)
    servers.router(topology, bundles / "own")
    with open_blocking_channel(topology.router) as channel, Client(topology.router) as client:
        stub = health_pb2_grpc.HealthStub(channel)

        def serving(service: str) -> bool:
            request = health_pb2.HealthCheckRequest(service=service)
            status = stub.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status
            return status == health_pb2.HealthCheckResponse.SERVING

        assert serving("")
        assert not serving(SERVICE)
        until(lambda: "host-1 at" in client.status().hosts[0].reason)
        assert list(client.status().modes) == ["local"]
        running = servers.hosts(topology, bundles / "own")
        until(lambda: serving(SERVICE))
        assert client.generate("x", max_bytes=4).sweeps == 1
        running["host-1"].end()
        until(lambda: not serving(SERVICE))
        assert serving("")
        servers.hosts(topology, bundles / "own")
        until(lambda: serving(SERVICE))
        assert client.generate("x", max_bytes=4).sweeps == 1


def test_a_host_that_cannot_batch_has_a_warning(bundles: Path, servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_checks, "check_rows", lambda runner, part: part.index != 0)
    topology = local_topology(2, 3, bundles / "own", free_port_block(3) + 1)
    servers.ring(topology, bundles / "own")
    with Client(topology.router) as client:
        assert [host.warning for host in client.status().hosts] == [ONE_AT_A_TIME, ""]
        monkeypatch.setattr(Expiry, "until_s", lambda expiry: 1 << 30)
        ends = ending(1 << 30)
        until(lambda: [host.warning for host in client.status().hosts] == [f"{ends}; {ONE_AT_A_TIME}", ends])


def test_a_stopping_router_completes_requests_and_accepts_none(bundles: Path, servers: Any) -> None:
    topology = local_topology(1, 3, bundles / "own", free_port_block(2) + 1)
    router = servers.ring(topology, bundles / "own", drain_s=60.0)["router"]

    def refused() -> RouterError | None:
        try:
            client.generate("x", max_bytes=1)
        except RouterError as error:
            return error
        return None

    with Client(topology.router) as client:
        stream = client.stream("x", mode="ar", max_bytes=200)
        next(stream)
        router.loop.call_soon_threadsafe(router.stop.set)
        error = until(refused)
        assert "the router is stopping: use another router, or try again later" in str(error)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        *_, result = stream
        assert isinstance(result, Result)
        assert result.output_bytes == 200
    router.ended.result(PATIENCE_S)


def test_status_lists_the_modes_that_can_be_served(deployment: Deployment) -> None:
    with Client(deployment.topology.router) as client:
        status = client.status()
    assert status.ready
    assert list(status.modes) == ["sweep", "chunked", "resample", "ar", "ar-speculative", "local", "auto"]
    assert status.context_tokens == 512
    assert all(host.rtt_ms > 0 for host in status.hosts)
    assert len(status.chain_digest) == len(status.ar_digest) == 64


def test_the_topology_must_fit_the_release_that_is_served(bundles: Path, tmp_path: Path, servers: Any) -> None:
    store = ReleaseStore(tmp_path)
    put_release(store, bundles / "other")
    store.use([read_release_manifest(bundles / "other").name])
    store.close()
    router = servers.router(local_topology(2, 2, bundles / "own", free_port_block(3) + 1), None, releases=tmp_path)
    with pytest.raises(InputError, match=r"the block count is 2 in the topology, but 3 in .*/[0-9a-f]+: make"):
        router.ended.result(PATIENCE_S)


def test_the_demo_shows_every_mode(
    bundles: Path, deployment: Deployment, onesweep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = contextlib.nullcontext(deployment)
    monkeypatch.setattr("serving.cli.demo.temporary_deployment", lambda *given: there)
    code, out, err = onesweep("demo", bundles / "own", "--prompt", "The sea ")
    assert code == 0, out + err
    assert "The weights are tiny" in out
    assert all(re.search(rf"^{mode} +\d+ ms", out, re.MULTILINE) for mode in ("sweep", "chunked", "ar", "local"))
    assert all(f"\n{mode}:\n  The sea |" in out for mode in ("sweep", "chunked", "ar", "ar-speculative", "local"))
    assert "`ar-speculative` writes the text of `ar`: checked" in out
    assert "stopped" in out


def test_a_router_starts_despite_a_damaged_release_in_its_store(
    bundles: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, contents = ReleaseStore(tmp_path / "releases"), read_release_manifest(bundles / "other")
    put_release(store, bundles / "other")
    store.use([contents.name])
    topology = local_topology(3, 3, bundles / "own", free_port_block(4) + 1)
    settings = RouterSettings(topology, topology.router, bundles / "own")

    async def first() -> ActiveRelease:
        ring = Ring(settings.ring)
        try:
            return first_release(ring, store, settings.checkpoint, partial(RouterParts.read, settings.checkpoint))
        finally:
            await ring.close()

    assert asyncio.run(first()).directory == store.path(contents.name)
    (tmp_path / "releases" / contents.name / "local" / "manifest.json").write_text("{")
    assert asyncio.run(first()).directory == bundles / "own"
    assert f"release {contents.name} is damaged: serving another that the hosts hold" in caplog.text
    store.close()
