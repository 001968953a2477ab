"""Requests that lose their router and continue at another. With real processes."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import AsyncClient, Client, Result, RouterError
from onesweep.serving.client.failover import RoutedAnswer, Routers
from onesweep.serving.router.topology import local_topology
from onesweep.serving.v1.router_pb2 import GenerateResponse, Summary
from tests.serving.gateway.conftest import run

PROMPT = "The road went "
# With 0.1 s a hop a router is lost long before these texts are whole.
SETTINGS: dict[str, dict[str, Any]] = {"ar": {"max_bytes": 12}, "sweep": {"max_bytes": 60}}


@pytest.fixture(scope="module")
def routers(bundles: Path, wait_ready: Any) -> Iterator[tuple[Deployment, str, str]]:
    """Three hosts and two routers, by their addresses."""
    port = free_port_block(5)
    topology, second = local_topology(3, 3, bundles / "own", port + 1), f"127.0.0.1:{port + 4}"
    options = ("--drain-s", "0.2")
    with temporary_deployment(topology, bundles / "own", router_options=options, second=second) as deployment:
        wait_ready(second)
        yield deployment, topology.router, second


class Asker(threading.Thread):
    """One request through both routers: with a client of either kind, or through the gateway."""

    def __init__(self, way: str, where: str, directory: Path, until: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self.way, self.where, self.directory, self.until, self.settings = way, where, directory, until, settings
        self.text, self.result = b"", b""
        self.start()

    def take(self, item: object) -> None:
        self.text += item if isinstance(item, bytes) else b""
        self.result += item.output if isinstance(item, Result) else b""

    def run(self) -> None:
        if self.way == "gateway":
            asked = {"model": "onesweep", "prompt": PROMPT, "stream": True, "seed": self.settings["seed"]}
            ours = {name: value for name, value in self.settings.items() if name != "seed"}
            with (
                run(self.directory, "--router", self.where, until=self.until) as gateway,
                httpx.stream("POST", f"{gateway.url}/v1/completions", json=asked | {"onesweep": ours}) as answer,
            ):
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.take(json.loads(line[6:])["choices"][0]["text"].encode())
            self.result = self.text
        elif self.way == "async":
            asyncio.run(self.stream())
        else:
            with Client(self.where) as client:
                for item in client.stream(PROMPT, **self.settings):
                    self.take(item)

    async def stream(self) -> None:
        async with AsyncClient(self.where) as client:
            async for item in client.stream(PROMPT, **self.settings):
                self.take(item)


@pytest.mark.parametrize(
    ("way", "mode", "number"),
    [
        ("plain", "ar", signal.SIGKILL),
        ("async", "ar", signal.SIGTERM),
        ("async", "sweep", signal.SIGKILL),
        ("gateway", "ar", signal.SIGKILL),
    ],
)
def test_a_request_continues_at_the_other_router(
    routers: Any, tmp_path: Path, until: Any, wait_ready: Any, way: str, mode: str, number: signal.Signals
) -> None:
    deployment, router, second = routers
    settings = {"mode": mode, "seed": 5, "link_ms": 100, **SETTINGS[mode]}
    with Client(router) as first:
        undisturbed = first.generate(PROMPT, **settings).output
        asker = Asker(way, f"{router},{second}", tmp_path, until, settings)
        until(lambda: first.status().requests == 1 and (asker.text or mode == "sweep"), 30.0)
    begun = asker.text
    os.kill(deployment.processes["router"], number)
    asker.join(60)
    assert begun != undisturbed
    assert (asker.text, asker.result) == (undisturbed, undisturbed)
    until(lambda: "router" in deployment.ended())
    with Client(f"{router},{second}") as client:
        assert client.generate(PROMPT, mode="local", max_bytes=4).output_bytes == 4, "new ones ask who answers"
        assert client.serves()
    deployment.revive("router")
    wait_ready(router)


def test_both_are_down() -> None:
    with Client("127.0.0.1:1,127.0.0.1:2") as client, pytest.raises(RouterError) as caught:
        client.generate("x")
    assert "no router answers at 127.0.0.1:1 or 127.0.0.1:2; start one" in str(caught.value)


@pytest.mark.parametrize("second", [GenerateResponse(text=b" sun"), GenerateResponse(summary=Summary())])
def test_another_text_is_an_error_and_is_never_glued(second: GenerateResponse) -> None:
    answer = RoutedAnswer(Routers(("a:1", "b:2")), 9.0)
    assert list(answer.read(GenerateResponse(text=b"The sea"))) == [b"The sea"]
    answer.lost(RouterError("gone", grpc.StatusCode.UNAVAILABLE))
    assert not list(answer.read(GenerateResponse(text=b"The")))
    with pytest.raises(RouterError, match="b:2 does not write the text that another began"):
        list(answer.read(second))
