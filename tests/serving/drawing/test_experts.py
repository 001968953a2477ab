"""Experts on hosts: the pictures of one process wherever they are, each where its expert is, and nobody lost."""

import asyncio
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import AsyncClient, Client, RouterError
from serving.drawing import EXPERT_RULES
from serving.router.session import Session
from serving.router.topology import Topology, local_topology
from stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import Servers, wait_ready
from tests.serving.drawing.experts_here import pixel_digests
from tests.stages.pictures.tiny import tiny_experts

SEED, COUNT, LEVELS = 3, 6, 7
MODES = list(EXPERT_RULES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    tiny_experts(directory / "experts")
    return directory


@pytest.fixture(scope="module")
def three(bundle: Path, module_servers: Servers) -> Topology:
    return opened(module_servers, bundle, 3, 3)


def opened(servers: Servers, bundle: Path, hosts: int, parts: int, **router: Any) -> Topology:
    topology = local_topology(hosts, parts, bundle, free_port_block(hosts + 1) + 1)
    servers.hosts(topology, bundle)
    servers.router(topology, bundle, **router)
    wait_ready(topology.router)
    return topology


def digests(client: Client, mode: str, **settings: Any) -> list[str]:
    """Of the pictures that `pixel_digests` has."""
    drawn = [client.draw(str(i % 3), mode=mode, seed=SEED + i, levels=LEVELS, **settings).pixels for i in range(COUNT)]
    return [hashlib.sha256(pixels.tobytes()).hexdigest() for pixels in drawn]


@pytest.mark.parametrize("mode", MODES)
def test_pixels_are_those_of_one_process_under_any_mapping(
    mode: str, bundle: Path, three: Topology, servers: Servers
) -> None:
    wanted = pixel_digests(bundle / "experts", mode, LEVELS, SEED, COUNT)
    assert len(set(wanted)) == COUNT
    with Client(three.router) as client:
        assert client.status().drawing_modes == MODES
        assert digests(client, mode) == wanted
    two = opened(servers, bundle, 2, 3)
    with Client(two.router) as client:
        assert digests(client, mode) == wanted


def test_a_picture_goes_straight_to_its_expert_and_moves_when_another_leads(three: Topology) -> None:
    with Client(three.router) as client:
        once = [client.draw("one", mode="experts:once", seed=seed) for seed in range(6)]
        assert {drawn.hops for drawn in once} == {2}, "the router knows the host"
        assert len({next(iter(drawn.hosts)).name for drawn in once}) > 1
        moved = [client.draw("one", mode="experts:1", seed=seed) for seed in range(6)]
        assert any(drawn.hops > 2 for drawn in moved)


@pytest.mark.slow
def test_new_experts_are_deployed_with_their_router_net(bundle: Path, tmp_path: Path, onesweep: Any) -> None:
    other = tiny_experts(tmp_path / "other" / "experts", alike=True).parent
    topology = local_topology(3, 3, bundle, free_port_block(4) + 1)
    with temporary_deployment(topology, bundle) as running, Client(running.topology.router) as client:
        before = client.draw("one", mode="experts:1", seed=SEED).pixels
        code, said, err = onesweep("deploy", other, "--router", running.topology.router)
        assert code == 0, err
        assert "modes that work: experts:once, experts:1" in said
        assert not np.array_equal(client.draw("one", mode="experts:1", seed=SEED).pixels, before)


async def leave_a_drawing(router: str, token: str) -> None:
    async with AsyncClient(router, token=token) as client:
        drawing = asyncio.create_task(client.draw("one", mode="experts:1"))
        for under_way in (1, 0):
            while (await client.status()).requests != under_way:
                await asyncio.sleep(0.01)
            drawing.cancel()


async def no_event(session: Session, check: Any = None) -> Any:
    await asyncio.Event().wait()


def test_a_quota_of_bytes_counts_pixels(
    bundle: Path, three: Topology, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, other = new_token(), replace(three, router=f"127.0.0.1:{free_port_block(1)}")
    key = Key("greedy", token_hash(token), ("generate", "status"), bytes_per_day=200)
    write_tokens(tmp_path / "tokens.toml", [key])
    servers.router(other, bundle, tokens=tmp_path / "tokens.toml")
    wait_ready(other.router, token=token)
    with Client(other.router, token=token) as client:
        draw = partial(client.draw, "one", mode="experts:1")
        assert draw(pictures=2).pixels.nbytes == 128
        with pytest.raises(RouterError, match="may use 200 bytes a day, prompts included: 72 are left") as refused:
            draw(pictures=2)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        with monkeypatch.context() as patched:
            patched.setattr(Session, "event", no_event)
            asyncio.run(leave_a_drawing(other.router, token))
        with pytest.raises(RouterError, match="8 are left until midnight UTC, and 64 were asked for"):
            draw()
