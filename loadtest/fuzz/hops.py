"""Makes captured hops ones that a host would take now."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from google.protobuf.message import Message

from stages.v1 import stage_pb2

AHEAD_S = 15.0
FEW = 8
"""Names of sessions, so that some are met again: replayed, out of order, released."""


class Refresh:
    """For hops, alone or in another message."""

    def __init__(self, rng: random.Random, router: str, path: Sequence[str]) -> None:
        """:param router: who listens for their results.
        :param path: addresses of the hosts of a sweep."""
        self.rng, self.router, self.path = rng, router, list(path)

    def __call__(self, message: Message) -> None:
        if isinstance(message, stage_pb2.Hop):
            self.hop(message)
        elif isinstance(message, stage_pb2.Parcel):
            for hop in message.hops:
                self.hop(hop)
        elif isinstance(message, stage_pb2.RunRequest):
            self.hop(message.hop)

    def hop(self, hop: stage_pb2.Hop) -> None:
        hop.router = self.router
        hop.deadline_unix_ms = int((time.time() + AHEAD_S) * 1000)
        hop.session = (
            f"{self.router}.{self.rng.randrange(FEW) if self.rng.random() < 0.3 else self.rng.getrandbits(48):x}"
        )
        if hop.path:
            hop.path[:] = self.path
            hop.place = min(hop.place, len(self.path) - 1)
