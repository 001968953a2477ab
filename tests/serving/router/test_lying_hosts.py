"""A liar among replicas, for a hundred prompts of each of two clients; then it is put right, and all is restarted."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client, RouterError
from serving.router.topology import local_topology
from stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import until, wait_ready

pytestmark = pytest.mark.slow

PROMPTS = [
    f"{topic}. " + f"The {topic} was calm, and nobody knew why. " * 3 for topic in ("sea", "wind", "moon", "town")
]
ASK: dict[str, Any] = {"mode": "ar", "max_bytes": 8, "codec": "fp32", "seed": 5}
EACH = 100


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("liar", ["host-1-1", "host-2-2"])
def test_no_wrong_prefix_is_used_after_a_faulty_host_was_restarted(
    bundles: Path,
    servers: Any,
    local_ring: Any,
    lying: Callable[[str, Callable[[], bool]], None],
    tmp_path: Path,
    liar: str,
    share: float,
) -> None:
    bundle, chance, lies = bundles / "scored", random.Random(f"{liar} {share}"), [True]
    lying(liar, lambda: bool(lies) and chance.random() < 0.3)
    with local_ring(bundle, 3, host={"prefix_mb": 0}) as clean:
        right = {prompt: clean.generate(prompt, **ASK).output for prompt in PROMPTS}
    tokens, path = [new_token() for _ in range(2)], tmp_path / "tokens.toml"
    write_tokens(
        path, [Key(f"client-{i}", token_hash(token), ("generate", "status")) for i, token in enumerate(tokens)]
    )
    topology = local_topology(3, 3, bundle, free_port_block(7) + 1, replicas=2)
    hosts = servers.hosts(topology, bundle)

    def start_router() -> Any:
        ring, store = {"audit_share": share}, tmp_path / "releases"
        started = servers.router(topology, bundle, ring=ring, tokens=path, releases=store)
        wait_ready(topology.router, token=tokens[0])
        return started

    def start_host(name: str) -> Callable[[], None]:
        def restart() -> None:
            entry = next(each for each in topology.hosts if each.name == name)
            hosts[name].end()
            hosts[name] = servers.stage(bundle, entry.blocks, entry.listen, topology.successors(entry), name=name)

        return restart

    def ask_all() -> tuple[int, int]:
        """Wrong answers, and tokens that came from memory."""
        wrong = cached = 0
        for number in range(EACH):
            for token in tokens:
                prompt = PROMPTS[number % len(PROMPTS)]
                with Client(topology.router, token=token) as client:
                    try:
                        result = client.generate(prompt, **ASK)
                    except RouterError:  # a lie that was found in time
                        continue
                wrong += result.output != right[prompt]
                cached += result.cached_tokens
        return wrong, cached

    router = start_router()
    until(lambda: ask_all()[0] or share)  # without audits a liar is believed, once requests go its way
    lies.clear()
    restarts: list[Callable[[], None]] = [start_host(liar), start_host("host-3-1")]
    chance.shuffle(restarts)
    at = chance.randrange(3)
    for restart in restarts[:at]:
        restart()
    router.end()
    router = start_router()
    for restart in restarts[at:]:
        restart()
    with Client(topology.router, token=tokens[0]) as client:
        until(lambda: client.status().ready)
        wrong, cached = ask_all()
        suspected = {host.name for host in client.status().hosts if "quarantined" in host.reason}
    assert wrong == 0
    assert cached > EACH * len(PROMPTS[0]) // 2, "honest hosts keep their memory"
    assert suspected <= {liar}
