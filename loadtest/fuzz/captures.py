"""Real messages of real requests, taken down as they pass the interposers."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from loadtest.fuzz.healthy import ASKED, PROMPT, SEED, TIMEOUT_S
from loadtest.fuzz.interposer import Hook, unchanged
from loadtest.fuzz.scene import ROUTER, STAGE, Scene
from serving.client import AsyncClient, request_of
from stages.v1 import stage_pb2

MOST_KEPT = 64
"""Of one kind."""
SETTLE_S = 1.2
"""Long enough for each host to be described and kept warm."""


class Captures:
    """Requests and answers by method, and hops by what they carry."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, list[bytes]] = defaultdict(list)
        self.answers: defaultdict[str, list[bytes]] = defaultdict(list)
        self.hops: list[bytes] = []

    def keeping(self, kept: defaultdict[str, list[bytes]]) -> Hook:
        def keep(method: str, data: bytes) -> bytes:
            if len(kept[method]) < MOST_KEPT and data not in kept[method]:
                kept[method].append(data)
            return data

        return keep


async def record(scene: Scene) -> Captures:
    """Have every mode served over the interposers. Raises OnesweepError."""
    captures = Captures()
    ways = (*scene.between, scene.before_router)
    for way in ways:
        way.on_request, way.on_answer = captures.keeping(captures.requests), captures.keeping(captures.answers)
    async with AsyncClient(scene.deceived) as client, AsyncClient(scene.posing) as posed:
        for asked in ASKED:
            await client.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked)
            request = request_of(PROMPT, seed=SEED, **asked)
            captures.requests["Generate"].append(request.SerializeToString())
        for asked in ASKED:
            await posed.generate(PROMPT, seed=SEED, timeout_s=TIMEOUT_S, **asked)
        await posed.status()
    await asyncio.sleep(SETTLE_S)
    for way in ways:
        way.on_request = way.on_answer = unchanged
    for data in captures.requests["Push"]:
        captures.hops += [hop.SerializeToString() for hop in stage_pb2.Parcel.FromString(data).hops]
    methods = [method.name for service in (STAGE, ROUTER) for method in service.methods]
    for method in methods:  # what no request brings about: Run, Probe
        captures.requests[method] = captures.requests[method] or [b""]
    return captures
