"""What is fuzzed: real processes on loopback, with small limits so that their bounds are met."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.fuzz.interposer import Interposer
from serving.client import Client, RouterError
from serving.deployment import MODULE, Deployment
from serving.ports import free_port_block
from serving.shipped import SHIPPED
from serving.topology import HostEntry, Topology, local_topology
from serving.v1 import router_pb2
from stages.errors import ServiceError
from stages.v1 import stage_pb2

HOSTS = 2
BLOCKS = 3
QUEUE = 32
LEASE_S = 10.0
LIMITS = ("--session-mb", "48", "--queue", str(QUEUE), "--lease-s", f"{LEASE_S:g}")
ROUTER_LIMITS = ("--max-requests", "32", "--max-waiting", "16")
READY_S = 120.0
STOP_S = 15.0
STAGE = stage_pb2.DESCRIPTOR.services_by_name["StageService"]
ROUTER = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
DECEIVED = "deceived"
"""The router that hears of its hosts over interposers only."""


@dataclass
class Scene:
    """Addresses, and what runs there."""

    directory: Path
    deployment: Deployment
    gateway: str
    deceived: str
    """Address of a second router, whose every link and every link between its hosts passes an interposer."""
    between: list[Interposer]
    """One before each host."""
    before_router: Interposer
    posing: str
    """Where that one listens."""
    extra: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def router(self) -> str:
        return self.deployment.topology.router

    @property
    def hosts(self) -> list[str]:
        return [host.listen for host in self.deployment.topology.hosts]

    def processes(self) -> dict[str, psutil.Process | None]:
        """By name; None for one that ended."""
        pids = self.deployment.processes | {name: process.pid for name, process in self.extra.items()}
        found: dict[str, psutil.Process | None] = {}
        for name, pid in pids.items():
            found[name] = None
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[name] = process
        return found

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def spawn(self, name: str, *arguments: str) -> None:
        """Start another process of ours, whose log is watched, too."""
        with self.log(name).open("wb") as log:
            self.extra[name] = subprocess.Popen(
                [sys.executable, *MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, name: str) -> None:
        process = self.extra.pop(name)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


@contextlib.asynccontextmanager
async def open_scene() -> AsyncIterator[Scene]:
    """A deployment with a gateway, and a second router behind interposers; ready. Raises OnesweepError."""
    port = free_port_block(2 * HOSTS + 4)
    topology = local_topology(HOSTS, BLOCKS, SHIPPED, port + 1)
    gateway, deceived, posing = (f"127.0.0.1:{port + HOSTS + n}" for n in (1, 2, 3))
    veiled = [f"127.0.0.1:{port + HOSTS + 4 + n}" for n in range(HOSTS)]
    directory = Path(tempfile.mkdtemp(prefix="onesweep-fuzz-"))
    directory.chmod(0o700)
    between = [Interposer(STAGE, veil, host.listen) for veil, host in zip(veiled, topology.hosts, strict=True)]
    before_router = Interposer(ROUTER, posing, topology.router)
    # every host may be followed by any: it finds out itself which of them fit
    after = ",".join([host.address for host in topology.hosts] + veiled)
    options = {"host_options": (*LIMITS, "--next", after), "router_options": ROUTER_LIMITS, "http": gateway}
    deployment = await asyncio.to_thread(Deployment.start, topology, SHIPPED, directory, **options)  # type: ignore[arg-type]
    scene = Scene(directory, deployment, gateway, deceived, between, before_router, posing)
    try:
        for interposer in (*between, before_router):
            await interposer.start()
        entries = [HostEntry(h.name, veil, h.blocks, veil) for h, veil in zip(topology.hosts, veiled, strict=True)]
        path = directory / f"{DECEIVED}.toml"
        path.write_text(Topology(tuple(entries), deceived, SHIPPED).to_toml(), encoding="utf-8")
        scene.spawn(DECEIVED, "router", "--topology", str(path), "--checkpoint", str(SHIPPED), "--threads", "1")
        await asyncio.to_thread(deployment.wait_ready)
        await asyncio.to_thread(deployment.wait_listening, gateway, READY_S)
        await asyncio.to_thread(wait_ready, deceived)
        yield scene
    finally:
        for name in list(scene.extra):
            scene.end(name)
        await asyncio.to_thread(deployment.stop)
        for interposer in (*between, before_router):
            await interposer.close()
        shutil.rmtree(directory, ignore_errors=True)


def wait_ready(router: str, within_s: float = READY_S) -> None:
    """Return when a router can serve. Raises ServiceError."""
    deadline = time.monotonic() + within_s
    with Client(router) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(RouterError):
                if client.status(2.0).ready:
                    return
            time.sleep(0.1)
    raise ServiceError(f"the router at {router} is not ready after {within_s:g} s")
