"""Inputs of one message type: captures mutated, messages drawn from the descriptor, raw bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from loadtest.fuzz.mutation import changed, damaged
from loadtest.fuzz.strategies import drawn, messages

POOL = 48
"""Messages drawn from a descriptor: hypothesis takes its time, so they are used again, and changed then."""
SHARES = ("changed",) * 9 + ("damaged",) * 4 + ("drawn",) * 2 + ("merged",) * 3 + ("raw",) + ("as it was",)
"""How often each way is taken."""
MOST_RAW = 512


class Inputs:
    """Bytes of one message type, always the same for one seed and one set of captures."""

    def __init__(
        self,
        kind: type[Message],
        captures: Sequence[bytes],
        rng: random.Random,
        prepare: Callable[[Message], None] = lambda message: None,
    ) -> None:
        """:param prepare: makes a capture one that would be taken now, before it is mutated."""
        self.kind, self.rng, self.prepare = kind, rng, prepare
        self.captures = captures or [b""]
        self._pool: list[Message] = []
        self._fresh = 0

    def take(self, count: int) -> list[bytes]:
        return [self._one(self.rng.choice(SHARES)) for _ in range(count)]

    def _one(self, way: str) -> bytes:
        rng = self.rng
        if way == "raw":
            return rng.randbytes(rng.randrange(MOST_RAW))
        if way == "drawn":
            return self._draw().SerializeToString()
        message = self._capture()
        if way == "merged":
            message.MergeFrom(self._draw())
        if way == "changed":
            changed(rng, message, [self._capture()])
        data = message.SerializeToString()
        return damaged(rng, data, self.captures) if way == "damaged" else data

    def _capture(self) -> Message:
        message = self.kind()
        message.ParseFromString(self.rng.choice(self.captures))
        self.prepare(message)
        return message

    def _draw(self) -> Message:
        if not self._pool:
            strategy = messages(self.kind.DESCRIPTOR)
            self._pool = drawn(strategy, POOL, self.rng.getrandbits(32)) or [self.kind()]
        if self._fresh < len(self._pool):
            self._fresh += 1
            return self._pool[self._fresh - 1]
        message = self.kind()
        message.CopyFrom(self.rng.choice(self._pool))
        changed(self.rng, message)
        return message
