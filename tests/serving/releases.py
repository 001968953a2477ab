"""Releases to exchange, and requests to them."""

import shutil
from pathlib import Path
from typing import Any

from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import HostEntry, Topology

Texts = dict[str, bytes]

PROMPT = b"The sea was calm. "
REQUESTS: dict[str, dict[str, Any]] = {
    "sweep": {"mode": "sweep", "max_bytes": 32},
    "chunked": {"mode": "chunked", "max_bytes": 24, "chunk": 4},
    "ar": {"mode": "ar", "max_bytes": 48},
    "ar-speculative": {"mode": "ar-speculative", "max_bytes": 24, "draft": 2},
    "resample": {"mode": "resample", "max_bytes": 24, "chunk": 4, "candidates": 4},
    "local": {"mode": "local", "max_bytes": 16},
}


def composed(directory: Path, bundle: Path, scorer: Path) -> Path:
    shutil.copytree(bundle, directory, dirs_exist_ok=True)
    shutil.copytree(scorer, directory / "scorer")
    return directory


def answer(client: Client, key: str) -> bytes:
    return client.generate(PROMPT, seed=3, **REQUESTS[key]).output


def doubled(checkpoint: Path) -> Topology:
    """Blocks 0 and 1 on two hosts, block 2 on two others."""
    port = free_port_block(5)
    spans = {"a-1": (0, 1), "a-2": (0, 1), "b-1": (2,), "b-2": (2,)}
    addresses = [f"127.0.0.1:{port + 1 + i}" for i in range(4)]
    hosts = [
        HostEntry(name, address, blocks, address)
        for (name, blocks), address in zip(spans.items(), addresses, strict=True)
    ]
    return Topology(tuple(hosts), f"127.0.0.1:{port}", checkpoint)


def all_ready(client: Client) -> bool:
    """True if every replica is there, and linked to the next ones: one of each kind is enough for a request."""
    hosts = client.status().hosts
    return all(host.ready and not any(link.problem for link in host.links) for host in hosts)
