"""The router's own computation of a host's work: the third opinion where two hosts disagree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from serving.topology import HostEntry
from stages.admission import check_hop
from stages.hop import Outcome, work_on
from stages.parts import HostPlan, Parts, load_parts, plan_host
from stages.sessions import KINDS, Kind, Session, SessionStore
from stages.v1 import stage_pb2

MOST_BYTES = 1 << 30


class Witness:
    """Any blocks of the bundles that are served, read when they are first asked for. Blocks the thread that asks."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoints: tuple[Path, ...] = (checkpoint,)
        self._parts: dict[tuple[Path, tuple[int, ...]], Parts] = {}

    def look_at(self, *checkpoints: Path) -> None:
        """Know these bundles, and no others."""
        self._checkpoints = checkpoints
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] in checkpoints}

    def knows(self, host: HostEntry, digest: str) -> bool:
        """Whether it has those weights for that host's blocks. Raises OnesweepError."""
        return self._plan(host.blocks, digest) is not None

    @torch.inference_mode()
    def outcomes(self, hops: Sequence[stage_pb2.Hop], host: HostEntry) -> list[Outcome]:
        """What follows from hops, the first of which opens a session on `host`, whose weights it `knows`.

        Raises OnesweepError, and Refusal for a hop that no host would take.
        """
        first = hops[0]
        found = self._plan(host.blocks, first.digest)
        assert found is not None
        key, plan = (found[0], host.blocks), found[1]
        parts = self._parts.get(key) or load_parts(plan)
        self._parts[key] = parts
        kind = check_hop(first, parts.plan)
        source = parts.plan.models[kind]
        session = SessionStore(MOST_BYTES, lease_s=MOST_BYTES).open(
            first.session, first.router, kind, first.capacity, source.manifest, parts
        )
        return [_outcome(hop, session) for hop in hops]

    def _plan(self, blocks: tuple[int, ...], digest: str) -> tuple[Path, HostPlan] | None:
        """The bundle that has those weights, and what a host with `blocks` has of it."""
        for checkpoint in self._checkpoints:
            loaded = self._parts.get((checkpoint, blocks))
            plan = loaded.plan if loaded else plan_host(checkpoint, blocks)
            if _kind(plan, digest) is not None:
                return checkpoint, plan
        return None


def _outcome(hop: stage_pb2.Hop, session: Session) -> Outcome:
    parts = session.parts
    check_hop(hop, parts.plan)
    work = work_on(hop, session, parts, parts.plan.blocks[-1] + 1)
    while work.outcome is None:
        demand = work.demand()
        work.supply(demand.compute([demand.piece])[0])
    return work.outcome


def _kind(plan: HostPlan, digest: str) -> Kind | None:
    return next((kind for kind in KINDS if kind in plan.models and plan.models[kind].digest == digest), None)
