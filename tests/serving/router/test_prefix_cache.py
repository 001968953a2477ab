"""The second turn of a chat: hosts have its prefix in their cache, and the text is as if they had not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client, Result
from serving.router.topology import Topology, local_topology
from stages.host.prefixes import Beginning, PrefixStore
from stages.model.prefill import ATTEND_POSITIONS
from stages.wire.status import StatusError
from stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import until, wait_ready

TALE = "The sea was calm, and the ship lay still. " * 7
MODES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar", "max_bytes": 12},
    "ar, penalties": {"mode": "ar", "max_bytes": 12, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "ar int8": {"mode": "ar", "max_bytes": 12, "codec": "int8"},
    "ar-speculative": {"mode": "ar-speculative", "max_bytes": 12, "draft": 4},
    "ar-speculative, trees": {"mode": "ar-speculative", "max_bytes": 12},
    "resample": {"mode": "resample", "max_bytes": 12, "chunk": 6, "candidates": 64},
}


@dataclass
class Line:
    """Three hosts, and two routers, the second of which wants tokens."""

    topology: Topology
    router: Any
    hosts: dict[str, Any]
    guarded: str
    tokens: list[str]


@pytest.fixture(scope="module")
def line(bundles: Path, module_servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Line:
    bundle, tokens = bundles / "scored", [new_token() for _ in range(2)]
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(path, [Key(f"client-{i}", token_hash(token)) for i, token in enumerate(tokens)])
    topology = local_topology(3, 3, bundle, free_port_block(4) + 1)
    guarded = replace(topology, router=f"127.0.0.1:{free_port_block(1)}")
    hosts = module_servers.hosts(topology, bundle)
    router = module_servers.router(topology, bundle)
    module_servers.router(guarded, bundle, tokens=path)
    wait_ready(topology.router)
    return Line(topology, router, hosts, guarded.router, tokens)


@pytest.fixture
def client(line: Line) -> Iterator[Client]:
    with Client(line.topology.router) as opened:
        yield opened


@pytest.fixture(scope="module")
def forgetful(bundles: Path, local_ring: Any) -> Iterator[Client]:
    """A ring of the same weights that keeps nothing."""
    with local_ring(bundles / "scored", 3, host={"prefix_mb": 0}) as opened:
        yield opened


@pytest.fixture
def second_turn(client: Client) -> Callable[..., tuple[str, Result]]:
    """The prompt of a chat's second turn, and its result once the hosts have kept the first one."""

    def ask(topic: str, **settings: Any) -> tuple[str, Result]:
        first = f"{topic}. {TALE}"
        result: Result = until(lambda: cached(client.generate(first, seed=5, **settings)))
        answer = result.output.decode(errors="replace")
        prompt = f"{first}{answer}\nAnd what did the captain say to the crew that night?"
        return prompt, client.generate(prompt, seed=6, **settings)

    return ask


def whole(text: str) -> int:
    """Bytes of it that hosts keep."""
    return len(text) // ATTEND_POSITIONS * ATTEND_POSITIONS


def cached(result: Result) -> Result | None:
    return result if result.cached_tokens else None


@pytest.mark.parametrize("name", list(MODES))
def test_the_text_is_the_one_without_a_prefix_cache(
    second_turn: Callable[..., tuple[str, Result]], forgetful: Client, name: str
) -> None:
    prompt, result = second_turn(name, **MODES[name])
    anew = forgetful.generate(prompt, seed=6, **MODES[name])
    assert result.output == anew.output
    assert (result.cached_tokens, anew.cached_tokens) == (whole(f"{name}. {TALE}"), 0)
    assert result.replays == 0
    assert result.wire_bytes_total < anew.wire_bytes_total


def test_modes_of_the_same_weights_share_the_cache(client: Client) -> None:
    prompt = f"What modes share. {TALE}"
    client.generate(prompt, seed=5, **MODES["ar"])
    until(lambda: cached(client.generate(prompt, seed=5, **MODES["ar-speculative"])))
    other = client.generate(prompt, seed=5, **MODES["ar int8"])
    assert other.cached_tokens == 0, "hidden states that were rounded give other keys and values"


# When hosts and routers come and go


def test_a_restarted_router_uses_the_cache(
    line: Line, module_servers: Any, second_turn: Callable[..., tuple[str, Result]], bundles: Path
) -> None:
    prompt, before = second_turn("A restarted router", **MODES["ar"])
    line.router.end()
    line.router = module_servers.router(line.topology, bundles / "scored")
    wait_ready(line.topology.router)
    with Client(line.topology.router) as client:
        after = client.generate(prompt, seed=6, **MODES["ar"])
    assert after.output == before.output
    assert after.cached_tokens >= before.cached_tokens


@pytest.mark.parametrize("host", [1, 2])
def test_an_evicted_prefix_is_read_again(
    client: Client, monkeypatch: pytest.MonkeyPatch, second_turn: Callable[..., tuple[str, Result]], host: int
) -> None:
    prompt, before = second_turn(f"Host {host} forgets", **MODES["ar"])
    find, asked = PrefixStore.find, list[bytes]()

    def lost(store: PrefixStore, digest: bytes, beginning: Beginning, positions: int) -> None:
        asked.append(digest)
        if len(asked) == host:
            raise StatusError(grpc.StatusCode.NOT_FOUND, "gone")
        find(store, digest, beginning, positions)

    monkeypatch.setattr(PrefixStore, "find", lost)
    after = client.generate(prompt, seed=6, **MODES["ar"])
    assert len(asked) == host
    assert (after.output, after.cached_tokens, after.replays) == (before.output, 0, 0)


def test_a_key_does_not_use_prefixes_of_another_key(line: Line) -> None:
    prompt = f"A secret. {TALE}"
    mine, yours = (Client(line.guarded, token=token) for token in line.tokens)
    with mine, yours, Client(line.topology.router) as anybody:
        anew = mine.generate(prompt, seed=5, **MODES["ar"])
        assert until(lambda: cached(mine.generate(prompt, seed=5, **MODES["ar"]))).output == anew.output
        for other in (yours, anybody):
            result = other.generate(prompt, seed=5, **MODES["ar"])
            assert (result.output, result.cached_tokens) == (anew.output, 0)


def test_prefixes_of_a_faulty_host_are_not_used_after_its_restart(
    bundles: Path, servers: Any, forgetful: Client, lying: Callable[[str, Callable[[], bool]], None]
) -> None:
    """The router continues; tests/serving/router/test_lying_hosts.py has one that is started again."""
    bundle, lies = bundles / "scored", [True]
    lying("host-1", lambda: bool(lies))
    topology = local_topology(3, 3, bundle, free_port_block(4) + 1)
    hosts = servers.ring(topology, bundle)
    asked: dict[str, Any] = {"mode": "ar", "max_bytes": 12, "codec": "fp32", "seed": 5}
    with Client(topology.router) as client:
        until(lambda: cached(client.generate(TALE, **asked)))
    lies.clear()
    hosts["host-1"].end()
    entry = topology.hosts[0]
    servers.stage(bundle, entry.blocks, entry.listen, topology.successors(entry), name="host-1")
    right = forgetful.generate(TALE, **asked).output
    with Client(topology.router) as client:
        until(lambda: client.status().ready)
        assert client.generate(TALE, **asked).output == right
        found = until(lambda: cached(client.generate(TALE, **asked)))
    assert found.output == right
