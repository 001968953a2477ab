"""Links to the hosts that may come next: checked, kept warm, and changed while they are in use."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from stages.errors import InputError
from stages.host import next_hosts as links_module
from stages.host.next_hosts import NextHosts
from stages.v1 import stage_pb2
from stages.wire.hop_stream import Relay
from tests.conftest import eventually, refused


@asynccontextmanager
async def opened(wiring: Any = lambda address, other: "", keep_warm_s: float = 0.05) -> AsyncIterator[NextHosts]:
    links = NextHosts(wiring, 1000, 4 << 20, 1.0, keep_warm_s)
    try:
        yield links
    finally:
        await links.close()


@pytest.fixture(scope="module")
def addresses(bundles: Path, module_servers: Any) -> list[str]:
    port = free_port_block(2)
    found = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    for address in found:
        module_servers.stage(bundles / "own", (0, 1, 2), address, None, name=address.replace(":", "-"))
    return found


async def test_a_host_is_ready_with_one_of_several_next_hosts(addresses: list[str]) -> None:
    async with opened() as links:
        assert links.problem == ""
        links.set_addresses([addresses[0], "127.0.0.1:1"])
        assert "has not been reached yet" in links.problem
        await eventually(lambda: not links.problem)
        assert [relay.address for relay in links.relays if not relay.problem] == addresses[:1]
        await eventually(lambda: "cannot be reached" in links.relays[1].problem)
        assert links.to(addresses[0]).min_rtt_ms is not None


async def test_next_hosts_change_while_in_use(addresses: list[str]) -> None:
    async with opened() as links:
        links.set_addresses(addresses[:1])
        await eventually(lambda: not links.problem)
        kept = links.to(addresses[0])
        links.set_addresses(addresses)
        await eventually(lambda: not any(relay.problem for relay in links.relays))
        assert links.to(addresses[0]) is kept
        links.set_addresses(addresses[1:])
        assert [relay.address for relay in links.relays] == addresses[1:]
        assert links.to("") is links.to(addresses[1]), "the only one needs no name"


async def test_a_host_with_the_wrong_blocks_is_not_used(addresses: list[str]) -> None:
    def wiring(address: str, other: stage_pb2.DescribeResponse) -> str:
        return f"{other.name} holds {list(other.blocks)}" if address == addresses[0] else ""

    async with opened(wiring) as links:
        links.set_addresses(addresses)
        await eventually(lambda: not links.relays[1].problem and "holds [0, 1, 2]" in links.relays[0].problem)


@pytest.mark.parametrize("address", ["127.0.0.1:9", ""])
async def test_unnamed_hosts_are_not_dialled(addresses: list[str], address: str) -> None:
    async with opened() as links:
        links.set_addresses(addresses)
        way = address or "a single next host"
        with refused(grpc.StatusCode.FAILED_PRECONDITION, f"^no link to {way}: .* may send to {', '.join(addresses)}$"):
            links.to(address)


async def test_a_link_that_could_not_be_opened_is_retried(addresses: list[str], monkeypatch, caplog) -> None:
    """A certificate of which one half is replaced, for example."""
    failures = [InputError("the key is not the certificate's")] * 3

    def make(*args: Any, **kwargs: Any) -> Relay:
        if failures:
            raise failures.pop()
        return Relay(*args, **kwargs)

    monkeypatch.setattr(links_module, "Relay", make)
    monkeypatch.setattr(links_module, "AGAIN_S", 0.05)

    async with opened() as links:
        links.set_addresses(addresses[:1])
        assert links.relays == []
        await eventually(lambda: links.relays and not links.problem)
    messages = [message for message in caplog.messages if message.startswith("no link to")]
    assert messages == [f"no link to {addresses[0]}: the key is not the certificate's"], "once"


@pytest.mark.parametrize("keep_warm_s", [0.05, 0.0])
async def test_a_replaced_host_is_noticed(addresses: list[str], monkeypatch, keep_warm_s: float) -> None:
    """At the same address, and quicker than a message is missed."""
    monkeypatch.setattr(links_module, "REVIEW_S", 0.1)
    wrong = []

    async with opened(lambda address, other: "".join(wrong), keep_warm_s) as links:
        links.set_addresses(addresses[:1])
        await eventually(lambda: not links.problem)
        wrong.append("it holds other blocks")
        await eventually(lambda: links.problem == "it holds other blocks")
        wrong.clear()
        await eventually(lambda: not links.problem)
