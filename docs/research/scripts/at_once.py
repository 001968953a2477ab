"""Tokens a second of requests for `ar` at once, and processor time a token of router and hosts together.

    python docs/research/scripts/at_once.py CHECKPOINT REQUESTS TOKENS ROUNDS

Three hosts over loopback; least, median and most of the rounds after the first.
"""

import asyncio
import sys
import time
from pathlib import Path

import psutil

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import AsyncClient
from serving.router.topology import local_topology

PROMPT = b"The old man looked at the sea and said that"


async def measured(router: str, pids: list[int], requests: int, tokens: int, rounds: int) -> list[tuple[float, float]]:
    def worked_s() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    found = []
    async with AsyncClient(router) as client:
        for _ in range(rounds + 1):
            begin, before = time.perf_counter(), worked_s()
            asked = (client.generate(PROMPT, mode="ar", max_tokens=tokens, seed=seed) for seed in range(requests))
            count = sum(result.output_tokens for result in await asyncio.gather(*asked))
            found.append((count / (time.perf_counter() - begin), 1000 * (worked_s() - before) / count))
    return found[1:]


checkpoint, (requests, tokens, rounds) = Path(sys.argv[1]).resolve(), map(int, sys.argv[2:])
ring = local_topology(3, 3, checkpoint, free_port_block(4) + 1)
with temporary_deployment(ring, checkpoint) as deployment:
    found = asyncio.run(measured(ring.router, list(deployment.processes.values()), requests, tokens, rounds))
for name, values in zip(("tokens/s", "processor ms a token"), zip(*found, strict=True), strict=True):
    each = sorted(values)
    print(f"{name}: {each[0]:.3g} {each[len(each) // 2]:.4g} {each[-1]:.4g}")
