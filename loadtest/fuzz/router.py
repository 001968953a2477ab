"""Target `router`: every call of the router, with metadata of all sorts."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Sequence

from google.protobuf.message import Message

from loadtest.fuzz.calls import Caller
from loadtest.fuzz.captures import Captures
from loadtest.fuzz.inputs import Inputs
from loadtest.fuzz.ports import garbage
from loadtest.fuzz.scene import Scene
from loadtest.fuzz.target import Target, all_of
from serving.v1 import router_pb2

SERVICE = "/serving.v1.RouterService"
BRIEF_S = 2.5
PATIENT = 50
"""Messages of an answer; the rest is left."""


class RouterTarget(Target):
    name = "router"

    def __init__(self, scene: Scene, captures: Captures, rng: random.Random) -> None:
        super().__init__()
        self.scene, self.rng = scene, rng
        self.caller = Caller(scene.router, self.tally)
        self.generate = Inputs(router_pb2.GenerateRequest, captures.requests["Generate"], rng, self._small)
        self.status = Inputs(router_pb2.StatusRequest, captures.requests["Status"], rng)

    async def send(self, count: int) -> None:
        few = max(count // 20, 1)
        requests = self.generate.take(count - 2 * few)
        calls: list[Awaitable[object]] = [
            self.caller.read(
                f"{SERVICE}/Generate",
                data,
                self.rng.choice((0, 1, PATIENT, PATIENT)),
                self.rng.choice((0.001, 0.3, BRIEF_S)),
                self._metadata(),
            )
            for data in requests
        ]
        calls += [self.caller.unary(f"{SERVICE}/Status", data) for data in self.status.take(few)]
        ports = [garbage(self.scene.router, self.rng, self.tally) for _ in range(few)]
        self.tally.inputs += len(calls) + len(ports)
        await all_of([*calls, *ports])

    async def close(self) -> None:
        await self.caller.close()

    def _small(self, message: Message) -> None:
        """What is still right after its mutation shall not take seconds."""
        assert isinstance(message, router_pb2.GenerateRequest)
        message.max_bytes = min(message.max_bytes, self.rng.randint(1, 8))

    def _metadata(self) -> Sequence[tuple[str, str | bytes]]:
        rng = self.rng
        return rng.choice(
            (
                (),
                (),
                (
                    (
                        "authorization",
                        rng.choice(("", "Bearer", "Bearer ", "Basic x", "bearer y", "Bearer " + "z" * 3000)),
                    ),
                ),
                (("x-bin", rng.randbytes(rng.randrange(64))), ("onesweep-request", "other")),
                tuple((f"k{n}", "v" * 10) for n in range(rng.randrange(60))),
            )
        )
