"""Requests that lose their router and continue at another. With real processes."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import AsyncClient, Client, RouterError
from onesweep.serving.client.failover import Turns
from onesweep.serving.router.topology import local_topology
from onesweep.serving.v1.router_pb2 import GenerateResponse, Summary
from tests.serving.gateway.conftest import run

PROMPT = "The road went "
SEED = 5


@pytest.fixture(scope="module")
def routers(bundles: Path, wait_ready: Any) -> Iterator[tuple[Deployment, str, str]]:
    """Three hosts and two routers, by their addresses."""
    port = free_port_block(5)
    topology, second = local_topology(3, 3, bundles / "own", port + 1), f"127.0.0.1:{port + 4}"
    options = ("--drain-s", "0.2")
    with temporary_deployment(topology, bundles / "own", router_options=options, second=second) as deployment:
        wait_ready(second)
        yield deployment, topology.router, second


def ask(way: str, where: str, directory: Path, until: Any, settings: dict[str, Any], text: bytearray) -> None:
    """One request through both routers, by a client of either kind or by the gateway; `text` grows as it comes."""

    async def stream() -> None:
        async with AsyncClient(where) as client:
            async for item in client.stream(PROMPT, **settings):
                text.extend(item if isinstance(item, bytes) else b"")

    if way == "async":
        asyncio.run(stream())
    elif way == "plain":
        with Client(where) as client:
            for item in client.stream(PROMPT, **settings):
                text.extend(item if isinstance(item, bytes) else b"")
    else:
        asked = {"model": f"onesweep-{settings['mode']}", "prompt": PROMPT, "max_tokens": settings["max_bytes"]}
        asked |= {"seed": SEED, "stream": True, "onesweep": {"link_ms": settings["link_ms"]}}
        with (
            run(directory, "--router", where, until=until) as gateway,
            httpx.stream("POST", f"{gateway.url}/v1/completions", json=asked) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text.extend(json.loads(line[6:])["choices"][0]["text"].encode())


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
    # with a twentieth of a second a hop, the router is lost long before the text is whole
    settings, text = {"mode": mode, "seed": SEED, "link_ms": 50, "max_bytes": 12}, bytearray()
    with Client(router) as first, ThreadPoolExecutor() as threads:
        undisturbed = first.generate(PROMPT, **settings).output
        asked = threads.submit(ask, way, f"{router},{second}", tmp_path, until, settings, text)
        until(lambda: first.status().requests == 1 and (text or mode == "sweep"), 30.0)
        begun = bytes(text)
        os.kill(deployment.processes["router"], number)
        asked.result(60)
    assert begun != undisturbed
    assert text in (undisturbed, undisturbed.decode(errors="replace").encode())
    until(lambda: "router" in deployment.ended())
    with Client(f"{router},{second}") as client:
        assert client.generate(PROMPT, mode="local", max_bytes=4).output_bytes == 4, "new ones ask the one that answers"
        assert client.serves()
    deployment.revive("router")
    wait_ready(router)


def test_both_are_down() -> None:
    with Client("127.0.0.1:1,127.0.0.1:2") as client, pytest.raises(RouterError) as caught:
        client.generate("x")
    assert "none of the routers 127.0.0.1:1 and 127.0.0.1:2 answers: no router answers at 127.0.0.1:2" in str(
        caught.value
    )


@pytest.mark.parametrize("second", [GenerateResponse(text=b" sun"), GenerateResponse(summary=Summary())])
def test_another_text_is_an_error_and_is_never_glued(second: GenerateResponse) -> None:
    answer = Turns(Client("127.0.0.1:1,127.0.0.1:2"), 9.0)
    assert list(answer.read(GenerateResponse(text=b"The sea"))) == [b"The sea"]
    answer.lost(RouterError("gone", grpc.StatusCode.UNAVAILABLE))
    assert not list(answer.read(GenerateResponse(text=b"The")))
    with pytest.raises(RouterError, match=":2 does not write the text that another began"):
        list(answer.read(second))
