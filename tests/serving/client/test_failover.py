"""Requests that lose their router and continue at another. With real processes."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import grpc
import httpx
import pytest

from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client import failover
from serving.client.client import AsyncClient, Client, RouterError
from serving.client.failover import Turns
from serving.router.session import Session
from serving.router.topology import local_topology
from serving.v1.router_pb2 import GenerateResponse, Summary, TokenLogprob
from serving.v1.router_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server
from stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import PATIENCE_S, until, wait_ready
from tests.serving.gateway.conftest import run

pytestmark = pytest.mark.slow

PROMPT, SEED, LENGTH = "The road went ", 5, 300


@pytest.fixture(scope="module")
def routers(bundles: Path) -> Iterator[tuple[Deployment, str, str]]:
    port, options = free_port_block(5), ("--set", "drain_s=0.2")
    topology, second = local_topology(3, 3, bundles / "own", port + 1), f"127.0.0.1:{port + 4}"
    with temporary_deployment(topology, bundles / "own", router_options=options, second=second) as deployment:
        wait_ready(second)
        yield deployment, topology.router, second


def ask(where: str, directory: Path | None, mode: str, text: bytearray, begun: Callable[[], None]) -> None:
    """One request through both routers, by a gateway where there is a directory for it; `text` grows as it comes.

    :param begun: called once some of it is here."""
    if directory is None:
        with Client(where) as client:
            for item in client.stream(PROMPT, mode=mode, seed=SEED, max_bytes=LENGTH):
                text.extend(item if isinstance(item, bytes) else b"")
                begun()
        return
    asked = {"model": f"onesweep-{mode}", "prompt": PROMPT, "max_tokens": LENGTH, "seed": SEED, "stream": True}
    with (
        run(directory, "--router", where) as gateway,
        httpx.stream("POST", f"{gateway.url}/v1/completions", json=asked) as lines,
    ):
        for line in lines.iter_lines():
            text.extend(json.loads(line[6:])["choices"][0]["text"].encode() if line.startswith("data: {") else b"")
            begun()


@pytest.mark.parametrize(
    ("mode", "number", "way"),
    [("ar", SIGTERM, ""), ("sweep", SIGKILL, ""), ("ar", SIGKILL, "gateway")],
)
def test_a_request_continues_at_the_other_router(
    routers: Any, tmp_path: Path, mode: str, number: int, way: str
) -> None:
    """A host stands still from the first text on, or before there is any, until the router is gone."""
    (deployment, router, second), text = routers, bytearray()
    host, frozen = deployment.processes["host-3"], threading.Event()

    def freeze() -> None:
        if not frozen.is_set():
            os.kill(host, SIGSTOP)
            frozen.set()

    with Client(router) as first, Client(f"{router},{second}") as client, ThreadPoolExecutor() as threads:
        whole = first.generate(PROMPT, mode=mode, seed=SEED, max_bytes=LENGTH).output
        if mode == "sweep":
            freeze()
        asked = threads.submit(ask, client.address, tmp_path if way else None, mode, text, freeze)
        until(lambda: first.status().requests == 1 and frozen.is_set())
        os.kill(deployment.processes["router"], number)
        until(lambda: "router" in deployment.ended())
        begun = bytes(text)
        os.kill(host, SIGCONT)
        asked.result(PATIENCE_S)
        assert begun != whole
        assert text in (whole, whole.decode(errors="replace").encode())
        assert client.generate(PROMPT, mode="local", max_bytes=4).output_bytes == 4, "new ones ask the one that answers"
        deployment.revive("router")
        wait_ready(router)
        deployment.kill(second)
        assert client.generate(PROMPT, mode="local", max_bytes=4).output_bytes == 4, "the first one is back"
    deployment.revive(second)
    wait_ready(second)


def test_routers_share_a_quota(bundles: Path, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it at each; a text that is written again where a router is lost counts there as well."""
    token, tokens, port, length = new_token(), tmp_path / "tokens.toml", free_port_block(4), 40
    both = 2 * (length + len(PROMPT))
    write_tokens(tokens, [Key("ada", token_hash(token), bytes_per_day=both + 1)])
    topology, second = local_topology(2, 3, bundles / "own", port + 1), f"127.0.0.1:{port + 3}"
    servers.hosts(topology, bundles / "own")
    lost, _ = (
        servers.router(replace(topology, router=each), bundles / "own", tokens=tokens, routers=2, drain_s=0.1)
        for each in (topology.router, second)
    )
    for each in (topology.router, second):
        wait_ready(each, token=token)
    with Client(f"{topology.router},{second}", token=token) as client, Client(second, token=token) as other:
        with pytest.raises(RouterError, match=f"ada may use {both // 2} bytes per day"):
            other.generate(PROMPT, mode="ar", max_bytes=length + 1)
        text, events, event = b"", count(), Session.event

        async def hold(session: Session, check: Any = None) -> Any:
            while lost is not None and next(events) > 4:  # until the first router is gone
                await asyncio.sleep(0.01)
            return await event(session, check)

        monkeypatch.setattr(Session, "event", hold)
        for item in client.stream(PROMPT, mode="ar", seed=SEED, max_bytes=length):
            if isinstance(item, bytes):
                text += item
            if lost is not None and len(text) >= 3:
                lost = lost.end()
        assert item.replays == 1
        with pytest.raises(RouterError, match=": 0 are left until midnight UTC"):
            other.generate(PROMPT, mode="ar", max_bytes=1)


class Dropping(RouterServiceServicer):
    """Ends every second call as gRPC does with some that wait for a busy event loop: the router never sees them."""

    def __init__(self) -> None:
        self.calls = 0

    async def Generate(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            await context.abort(grpc.StatusCode.CANCELLED)
        yield GenerateResponse(text=b"The sea")
        yield GenerateResponse(summary=Summary())


async def test_a_call_dropped_by_grpc_is_retried() -> None:
    server, service = grpc.aio.server(), Dropping()
    add_RouterServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(address) as client:
        assert (await client.generate("x")).output == b"The sea"
    with Client(address) as plain:
        assert (await asyncio.to_thread(plain.generate, "x")).output == b"The sea"
    assert service.calls == 4
    await server.stop(None)


def test_a_request_survives_a_router_restart(bundles: Path, servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "RECOVERY_S", 300.0)
    topology = local_topology(1, 3, bundles / "own", free_port_block(2))
    router, text = servers.ring(topology, bundles / "own", drain_s=0.1)["router"], b""
    with Client(topology.router) as client:
        whole = client.generate(PROMPT, mode="ar", seed=SEED, max_bytes=LENGTH).output
        for item in client.stream(PROMPT, mode="ar", seed=SEED, max_bytes=LENGTH):
            text += item if isinstance(item, bytes) else b""
            if router is not None:
                router = router.end()
                servers.router(topology, bundles / "own")
    assert text == whole


def test_two_unreachable_routers_are_named() -> None:
    message = "none of the routers 127.0.0.1:1 and 127.0.0.1:2 answers: no router answers at 127.0.0.1:[12]; start one"
    with Client("127.0.0.1:1,127.0.0.1:2") as client, pytest.raises(RouterError, match=message):
        client.generate("x", timeout_s=1.0)


@pytest.mark.parametrize("second", [GenerateResponse(text=b" sun"), GenerateResponse(summary=Summary())])
def test_a_second_router_with_another_text_is_an_error(second: GenerateResponse) -> None:
    answer = Turns(Client("127.0.0.1:1,127.0.0.1:2"), 9.0)
    tokens = [TokenLogprob(text=b"The"), TokenLogprob(text=b" sea")]
    assert list(answer.read(GenerateResponse(text=b"The sea", logprobs=tokens))) == [tokens, b"The sea"]
    answer.lost(RouterError("gone", grpc.StatusCode.UNAVAILABLE))
    assert not list(answer.read(GenerateResponse(text=b"The", logprobs=tokens[:1])))
    with pytest.raises(RouterError, match=":2 does not continue the text that another began"):
        list(answer.read(second))
