"""Links to the hosts that may come next: checked, kept warm, and changed while they are in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.deployment import free_port_block
from stages.links import Links
from stages.meter import HostMeter
from stages.refusal import Refusal
from stages.v1 import stage_pb2


@asynccontextmanager
async def opened(wiring: Any = lambda address, other: "") -> AsyncIterator[Links]:
    links = Links(wiring, 1000, 4 << 20, 1.0, 0.05, HostMeter())
    try:
        yield links
    finally:
        await links.close()


async def settled(check: Any) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.02)


@pytest.fixture
def addresses(bundles: Path, servers: Any) -> list[str]:
    port = free_port_block(2)
    found = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    for address in found:
        servers.stage(bundles / "own", (0, 1, 2), address, None, name=address.replace(":", "-"))
    return found


def test_one_of_several_is_enough(addresses: list[str]) -> None:
    async def story() -> None:
        async with opened() as links:
            assert links.problem == ""
            links.set_addresses([addresses[0], "127.0.0.1:1"])
            assert "was not reached yet" in links.problem
            await settled(lambda: not links.problem)
            assert [relay.address for relay in links.relays if not relay.problem] == addresses[:1]
            await settled(lambda: "cannot be reached" in links.relays[1].problem)
            assert links.to(addresses[0]).least_rtt_ms is not None

    asyncio.run(story())


def test_they_change_while_in_use(addresses: list[str]) -> None:
    async def story() -> None:
        async with opened() as links:
            links.set_addresses(addresses[:1])
            await settled(lambda: not links.problem)
            kept = links.to(addresses[0])
            links.set_addresses(addresses)
            await settled(lambda: not any(relay.problem for relay in links.relays))
            assert links.to(addresses[0]) is kept
            links.set_addresses(addresses[1:])
            assert [relay.address for relay in links.relays] == addresses[1:]
            assert links.to("") is links.to(addresses[1]), "the only one needs no name"

    asyncio.run(story())


def test_a_host_that_cannot_follow_is_no_way(addresses: list[str]) -> None:
    def wiring(address: str, other: stage_pb2.DescribeResponse) -> str:
        return f"{other.name} holds {list(other.blocks)}" if address == addresses[0] else ""

    async def story() -> None:
        async with opened(wiring) as links:
            links.set_addresses(addresses)
            await settled(lambda: not links.relays[1].problem and "holds [0, 1, 2]" in links.relays[0].problem)

    asyncio.run(story())


@pytest.mark.parametrize("address", ["127.0.0.1:9", ""])
def test_hosts_that_are_not_named_are_not_dialled(addresses: list[str], address: str) -> None:
    async def story() -> Refusal:
        async with opened() as links:
            links.set_addresses(addresses)
            with pytest.raises(Refusal) as caught:
                links.to(address)
            return caught.value

    refusal = asyncio.run(story())
    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
    assert refusal.message == (
        f"no link to {address or 'one next host only'}: --next names {addresses[0]}, {addresses[1]}"
    )
