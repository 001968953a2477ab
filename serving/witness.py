"""The router's own computation of a host's work: the third opinion where two hosts disagree."""

from __future__ import annotations

from pathlib import Path

import torch

from serving.topology import HostEntry
from stages.hop import Outcome, work_on
from stages.parts import HostPlan, Parts, load_parts, plan_host
from stages.sessions import KINDS, Kind, SessionStore
from stages.v1 import stage_pb2

MOST_BYTES = 1 << 30


class Witness:
    """Any blocks of a bundle, read when they are first asked for. Blocks the thread that asks."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._parts: dict[tuple[int, ...], Parts] = {}

    def knows(self, host: HostEntry, digest: str) -> bool:
        """Whether it has those weights for that host's blocks. Raises OnesweepError."""
        return _kind(self._plan(host.blocks), digest) is not None

    @torch.inference_mode()
    def outcome(self, hop: stage_pb2.Hop, host: HostEntry) -> Outcome:
        """What follows from a hop that opens a session on `host`, whose weights it `knows`. Raises OnesweepError."""
        if host.blocks not in self._parts:
            self._parts[host.blocks] = load_parts(self._plan(host.blocks))
        parts = self._parts[host.blocks]
        kind = _kind(parts.plan, hop.digest)
        assert kind is not None
        source = parts.plan.models[kind]
        session = SessionStore(MOST_BYTES, lease_s=MOST_BYTES).open(
            hop.session, hop.router, kind, hop.capacity, source.manifest, parts
        )
        work = work_on(hop, session, parts, parts.plan.blocks[-1] + 1)
        while work.outcome is None:
            demand = work.demand()
            work.supply(demand.compute([demand.piece])[0])
        return work.outcome

    def _plan(self, blocks: tuple[int, ...]) -> HostPlan:
        return self._parts[blocks].plan if blocks in self._parts else plan_host(self.checkpoint, blocks)


def _kind(plan: HostPlan, digest: str) -> Kind | None:
    return next((kind for kind in KINDS if kind in plan.models and plan.models[kind].digest == digest), None)
