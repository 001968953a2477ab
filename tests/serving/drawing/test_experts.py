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

from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import AsyncClient, Client, RequestRefused, RouterError
from onesweep.serving.drawing import EXPERT_RULES
from onesweep.serving.router.topology import Topology, local_topology
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import Servers, until, wait_ready
from tests.serving.drawing.experts_here import pixel_digests
from tests.serving.router.test_replicas import doubled
from tests.stages.pictures.test_hosts import FAR, NAN
from tests.stages.pictures.tiny import TINY, tiny_experts, tiny_picture_bundle
from tests.stages.raw_client import ROUTER, Peer, peer

SEED, COUNT, LEVELS = 3, 6, 7
MODES = list(EXPERT_RULES)
ROW = TINY.patch_dim + 4  # int8
STATE = bytes(TINY.tokens * ROW)


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


def test_pictures_in_company_are_those_alone(three: Topology) -> None:
    with Client(three.router) as client:
        for mode in MODES:
            together = client.draw(["two", "one"], pictures=10, mode=mode, seed=SEED)
            for index in (0, 13):
                alone = client.draw(together.classes[index], mode=mode, seed=SEED + index)
                assert np.array_equal(together.pixels[index], alone.pixels[0])


def test_a_picture_goes_straight_to_its_expert_and_moves_when_another_leads(three: Topology) -> None:
    with Client(three.router) as client:
        once = [client.draw("one", mode="experts:once", seed=seed) for seed in range(6)]
        assert {drawn.hops for drawn in once} == {2}, "the router knows the host"
        assert len({next(iter(drawn.hosts)).name for drawn in once}) > 1
        moved = [client.draw("one", mode="experts:1", seed=seed) for seed in range(6)]
        assert any(drawn.hops > 2 for drawn in moved)


def test_a_router_without_the_net_pays_a_trip_at_most(bundle: Path, three: Topology, servers: Servers) -> None:
    other = replace(three, router=f"127.0.0.1:{free_port_block(1)}")
    servers.router(other, None)
    wait_ready(other.router)
    with Client(three.router) as knows, Client(other.router) as guesses:
        for seed in range(4):
            first, second = (client.draw("two", mode="experts:once", seed=seed) for client in (knows, guesses))
            assert np.array_equal(first.pixels, second.pixels)
            assert second.hops in (2, 3)


def test_a_host_that_is_gone_costs_no_picture(bundle: Path, servers: Servers) -> None:
    topology = doubled(bundle)
    hosts = servers.hosts(topology, bundle)
    servers.router(topology, bundle)
    wait_ready(topology.router)
    with Client(topology.router) as client:
        draw = partial(client.draw, ["zero", "one", "two"], pictures=4, mode="experts:1", seed=SEED, timeout_s=60)
        wanted = draw().pixels
        hosts[topology.hosts[0].name].end()
        assert np.array_equal(draw().pixels, wanted)


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


@pytest.mark.slow
def test_experts_are_not_deployed_to_hosts_that_lack_links(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory, onesweep: Any
) -> None:
    chain = tiny_picture_bundle(tmp_path_factory.mktemp("chain"), ("chain",))
    topology = local_topology(3, 3, chain, free_port_block(4) + 1)
    with temporary_deployment(topology, chain) as running:
        code, _, err = onesweep("deploy", bundle, "--router", running.topology.router)
        assert code != 0
        assert "its experts need a link from each host to every other" in err
        with Client(running.topology.router) as client:
            assert client.status().drawing_modes == ["chain"]
            with pytest.raises(RequestRefused, match="the hosts have no experts/ that draws; served here: chain"):
                client.draw("one", mode="experts:1")


def is_ready(client: Client) -> bool:
    try:
        return client.status(2.0).ready
    except RouterError:
        return False


async def leave_a_drawing(router: str, token: str) -> None:
    async with AsyncClient(router, token=token) as client:
        drawing = asyncio.create_task(client.draw("one", mode="experts:1", link_ms=200))
        for under_way in (1, 0):
            while (await client.status()).requests != under_way:
                await asyncio.sleep(0.01)
            drawing.cancel()


def test_a_quota_of_bytes_counts_pixels(bundle: Path, three: Topology, servers: Servers, tmp_path: Path) -> None:
    token, other = new_token(), replace(three, router=f"127.0.0.1:{free_port_block(1)}")
    key = Key("greedy", token_hash(token), ("generate", "status"), bytes_per_day=200)
    write_tokens(tmp_path / "tokens.toml", [key])
    servers.router(other, bundle, tokens=tmp_path / "tokens.toml")
    with Client(other.router, token=token) as client:
        until(lambda: is_ready(client), 30)
        draw = partial(client.draw, "one", mode="experts:1")
        assert draw(pictures=2).pixels.nbytes == 128
        with pytest.raises(RouterError, match="may generate 200 bytes a day: 72 are left") as refused:
            draw(pictures=2)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        asyncio.run(leave_a_drawing(other.router, token))
        with pytest.raises(RouterError, match="8 are left until midnight UTC, and 64 were asked for"):
            draw()


# Bad hops


def consult(host: Peer, name: str, **fields: Any) -> stage_pb2.Hop:
    (release,) = host.describe().releases
    drawing = {"seed": 1, "classes": [1], "levels": LEVELS, "solver": "2m", "guidance": 1.5}
    work = {"rule": "top1", "codec": "int8", "places": [0, 1, 2], **fields}
    drawing.update(work.pop("drawing", {}))
    return stage_pb2.Hop(
        router=ROUTER,
        session=name,
        digest=release.experts.digest,
        left_s=60,
        path=["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"],
        consult=stage_pb2.Consult(drawing=stage_pb2.Drawing(**drawing), **work),
    )


STARTED = {"expert": 0, "level": 2, "estimate": STATE, "before": STATE}
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rule": "best"}, "unknown rule 'best'; choose from once, top1"),
    ({"drawing": {"classes": [0, 1]}}, "2 pictures for experts: each goes its own way"),
    ({"drawing": {"levels": 0}}, "0 noise levels; this model takes 1 to 256"),
    ({"places": [0, 1]}, "2 places for 3 experts on a path of 3 hosts"),
    ({"places": [0, 1, 3]}, "3 places for 3 experts on a path of 3 hosts: each needs one on it"),
    ({"places": []}, "0 places for 3 experts"),
    ({"places": [1, 0, 2], "expert": 0}, "expert 0 is at place 1 of the path, this is 0"),
    ({"level": LEVELS + 1, "expert": 0}, "the picture is done by then"),
    ({"rule": "once", "level": 1, "expert": 0}, "the picture is done by then"),
    ({"level": 2}, "names the one whose turn it is"),
    ({"codec": "jpeg"}, "unknown state codec 'jpeg'"),
    ({"moves": 2**32 - 1}, "none moves more than 257 times"),
    ({"estimate": STATE}, "carries no estimate"),
    ({"expert": 0, "before": STATE}, "carries no before"),
    ({**STARTED, "estimate": STATE[:-1]}, "int8 payload has 127 bytes; 16 x 4 numbers take 128"),
    ({**STARTED, "estimate": NAN + STATE[4:]}, "scales that are not finite, negative or beyond"),
    ({**STARTED, "estimate": FAR + STATE[4:]}, "scales that are not finite, negative or beyond"),
    ({**STARTED, "before": b""}, "int8 payload has 0 bytes"),
    ({"number": (1 << 62) + 1}, "the largest number is"),
)


def test_a_bad_hop_is_refused_and_leaves_nothing(three: Topology) -> None:
    name = "bad"
    with peer(three.hosts[0].address) as host:
        host.subscribe()
        for fields, sentence in BAD:
            error = host.refusal(consult(host, name, **fields))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert sentence in error.details(), fields
        error = host.refusal(consult(host, name, expert=1, places=[0, 0, 0]))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "expert 1 is not here: this host holds 0" in error.details()
        error = host.refusal(consult(host, name, expert=1 << 31))
        assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        assert not host.describe().counters.sessions
