"""The client's own parts: text that arrives in pieces, and requests."""

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, get_type_hints

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from serving.cli.deployment import Deployment
from serving.client.client import AsyncClient, Client, Result, RouterError, TextDecoder
from serving.client.failover import Turns
from serving.gateway.streams import merged
from serving.router.request import Request
from serving.router.session import Session
from serving.v1 import router_pb2
from stages.errors import InputError
from tests.conftest import PATIENCE_S
from tests.serving.pretrained import write_model


@given(st.binary(max_size=60), st.data())
def test_pieces_add_up_to_the_whole_text(raw: bytes, data: st.DataObject) -> None:
    decoder, shown, left = TextDecoder(), "", raw
    while left:
        cut = data.draw(st.integers(1, len(left)))
        shown, left = shown + decoder.feed(left[:cut]), left[cut:]
    assert shown + decoder.end() == raw.decode(errors="replace")


@given(st.text(max_size=30))
def test_no_character_is_split(text: str) -> None:
    decoder, shown = TextDecoder(), ""
    for byte in text.encode():
        shown += decoder.feed(bytes([byte]))
        assert text.startswith(shown), "a piece of a character was shown"
    assert shown == text
    assert decoder.end() == ""


def message_of(prompt: str | bytes, **settings: Any) -> router_pb2.GenerateRequest:
    return Request(prompt=prompt, **settings).message()


def test_omitted_settings_are_left_to_the_router() -> None:
    request = message_of("x")
    assert not any(request.HasField(name) for name in ("temperature", "chunk", "steps", "codec", "draft"))
    assert message_of("x", temperature=0.0).HasField("temperature")
    assert message_of(b"\xff").prompt == b"\xff", "the router explains invalid bytes"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_bytes": 2.5}, "max_bytes must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"steps": 1 << 40}, "steps must be a whole number"),
        ({"mode": "\udcff"}, "unknown mode"),
        ({"codec": "é"}, "unknown codec"),
    ],
)
def test_an_invalid_setting_is_refused_before_sending(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        message_of("x", **settings)


async def test_the_async_client_generates_and_streams_the_same_text(deployment: Deployment) -> None:
    async with AsyncClient(deployment.topology.router) as client:
        whole = await client.generate("x", mode="chunked", chunk=8, max_bytes=20)
        *pieces, last = [item async for item in client.stream("x", mode="chunked", chunk=8, max_bytes=20)]
        assert len((await client.status()).hosts) == 3
    assert isinstance(last, Result)
    enters = Client.__enter__, AsyncClient.__aenter__, Session.__enter__
    assert all(get_type_hints(enter)["return"] is Self for enter in enters), "a subclass is itself in its block"
    assert (len(pieces), b"".join(pieces)) == (3, whole.output)


async def test_a_router_waits_less_for_its_hosts_while_another_can_be_asked() -> None:
    async with AsyncClient("127.0.0.1:1,127.0.0.1:2") as client:
        turns, request = Turns(client, 9.0), router_pb2.GenerateRequest()
        assert turns.asking(request).has_other
        turns.lost(RouterError("a host loads its weights", StatusCode.UNAVAILABLE))
        assert not turns.asking(request).has_other


async def test_calls_of_a_closed_client_fail(deployment: Deployment) -> None:
    """Their tasks end, too: `merged` would wait for ever otherwise."""
    client = AsyncClient(deployment.topology.router)
    async with aclosing(merged([client.events("x", mode="ar", max_bytes=400)])) as pieces:
        await anext(pieces)
        await client.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RouterError, match="was closed"):
                _ = [piece async for piece in pieces]


PLANS = """
import sys, serving.client.client, serving.gateway.app, serving.router.doctor, serving.router.server
from pathlib import Path
from serving.cli.deploy import read_release
from stages.host.plan import plan_host
plan = plan_host(checkpoint := Path(sys.argv[1]), (0,))
read_release(checkpoint)
tokenizer = serving.router.server.RouterParts.read(checkpoint).tokenizers.of(plan.weights[1])
assert tokenizer.vocabulary.tokens(tokenizer.encode_text(b"the sea"))
assert 'torch' not in sys.modules
"""


def test_clients_and_routers_need_no_torch(tmp_path: Path) -> None:
    """Clients, the gateway, `up`, `deploy`, `doctor`, and a router whose checkpoint has no local/."""
    write_model(tmp_path)
    subprocess.run([sys.executable, "-c", PLANS, tmp_path], check=True)
