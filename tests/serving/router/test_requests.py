"""Requests over hosts that are full, late or lost, and sessions that are freed."""

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client, Result
from serving.router import host_link as links
from serving.router.host_link import HostLink
from serving.router.own_models import TOKENS_PER_TURN
from serving.router.topology import HostEntry, local_topology
from stages.v1 import stage_pb2
from tests.conftest import refused, wait_ready

PROMPT = b"The sea was calm. The sea was "


@pytest.mark.parametrize("mode", ["sweep", "chunked", "resample", "ar", "ar-speculative", "local"])
def test_a_streamed_text_is_the_whole_text(client: Client, mode: str) -> None:
    whole = client.generate(PROMPT, mode=mode, max_bytes=70, seed=9)
    text, _ = client.stream(PROMPT, mode=mode, max_bytes=70, seed=9, whole=True)
    assert text == whole.output, "in one piece, if it is wanted so"
    *pieces, last = client.stream(PROMPT, mode=mode, max_bytes=70, seed=9)
    assert isinstance(last, Result)
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == last.output == whole.output
    a_piece_a_sweep = dict.fromkeys(("chunked", "resample", "ar", "ar-speculative"), last.sweeps)
    assert len(pieces) == {"sweep": 1, "local": math.ceil(70 / TOKENS_PER_TURN), **a_piece_a_sweep}[mode]
    assert whole.text == whole.output.decode(errors="replace")


def test_a_seed_has_64_bits(client: Client) -> None:
    top = (1 << 64) - 1
    texts = [client.generate(PROMPT, max_bytes=20, seed=seed) for seed in (top, top - 1)]
    assert texts[0].seed == top
    assert texts[0].output != texts[1].output


def test_a_full_host_is_named_with_a_retry_time(bundles: Path, servers: Any) -> None:
    topology = local_topology(3, 3, bundles / "own", free_port_block(4) + 1)
    for host in topology.hosts:
        memory = 0 if host.name == "host-3" else 64
        servers.stage(
            bundles / "own", host.blocks, host.listen, topology.successors(host), name=host.name, session_mb=memory
        )
    servers.router(topology, None)
    wait_ready(topology.router)
    with Client(topology.router) as client:
        for mode in ("sweep", "ar", "ar-speculative"):
            with refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, r"host-3 at .* refused: no memory for another session"
            ) as caught:
                client.generate(PROMPT, mode=mode, max_bytes=5)
            assert caught.value.retry_after_ms == 1000


# Sessions are freed together


class Releases:
    """A host's face that takes releases down."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def Release(self, request: stage_pb2.ReleaseRequest, timeout: float) -> stage_pb2.ReleaseResponse:
        self.calls.append(list(request.sessions))
        return stage_pb2.ReleaseResponse()


async def test_sessions_that_end_together_are_freed_in_one_call_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RELEASE_AFTER_S", 0.05)
    stub, link = Releases(), HostLink(HostEntry("h", "127.0.0.1:1", (0,), "127.0.0.1:1"), 1.0)
    await asyncio.gather(link.release("a"), link.release("b"))  # the host is not reached, which does no harm
    await link.release("c")
    monkeypatch.setattr(link.relay, "stub", stub)
    await asyncio.gather(link.release(), *(link.release(name) for name in "de"))
    await link.release("f")
    await link.relay.close()
    assert stub.calls == [["a", "b", "c", "d", "e"], ["f"]]
