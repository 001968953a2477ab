"""The releases that a host holds at once: new requests may use another one than those that run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from stages.parts import HostPlan, ModelSource, Parts
from stages.refusal import Refusal
from stages.sessions import KINDS
from stages.v1 import stage_pb2

MOST_RELEASES = 2
"""In memory: what requests use, and what they used before, or are about to."""


@dataclass(eq=False)
class Release:
    """Weights that are used together, by the name of what brought them."""

    name: str
    plan: HostPlan
    parts: Parts | None = None
    """None while they are being loaded."""

    def info(self) -> stage_pb2.Release:
        models = {kind: _model_info(source) for kind, source in self.plan.models.items()}
        return stage_pb2.Release(name=self.name, loading=self.parts is None, **models)


class Releases:
    """A host's releases, the newest last. Lives on the event loop; never empty."""

    def __init__(self, first: Release) -> None:
        self.all = [first]

    @property
    def newest(self) -> Release:
        return self.all[-1]

    @property
    def loaded(self) -> list[Parts]:
        return [release.parts for release in self.all if release.parts is not None]

    def parts_for(self, digest: str) -> Parts:
        """The parts of the model called `digest`; of the newest release where there is no such model.

        Raises Refusal while nothing is loaded.
        """
        loaded = self.loaded
        if not loaded:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "this host is still loading its weights")
        return next((parts for parts in reversed(loaded) if digest in parts.plan.weights), loaded[-1])

    def named(self, name: str) -> Release | None:
        return next((release for release in self.all if release.name == name), None)

    def put_last(self, release: Release) -> None:
        """Make `release` the newest, whether it was here or not."""
        self.all = [*(other for other in self.all if other is not release), release]


def weights_of(release: stage_pb2.Release) -> tuple[str, ...]:
    """Like `HostPlan.weights`, from a host's description."""
    return tuple(getattr(release, kind).digest for kind in KINDS)


def wiring_problem(plans: Sequence[HostPlan], address: str, other: stage_pb2.DescribeResponse) -> str:
    """Why `other` cannot follow a host that holds `plans` in the ring; empty when it can."""
    plan = plans[-1]
    due = (plan.blocks[-1] + 1) % plan.parts
    if not other.blocks or other.blocks[0] != due:
        return f"{address} holds blocks {list(other.blocks)}, block {due} must come next: check --next and --blocks"
    theirs = [weights_of(release) for release in other.releases]
    if not theirs:
        return f"{other.name} at {address} says nothing of its weights: run the same version of onesweep everywhere"
    if any(mine.weights in theirs for mine in plans):
        return ""
    kind, mine, found = next(row for row in zip(KINDS, plan.weights, theirs[-1], strict=True) if row[1] != row[2])
    return (
        f"{other.name} at {address} has the {kind} checkpoint {found[:12] or '(none)'}, "
        f"this host {mine[:12] or '(none)'}: give every host the same checkpoint"
    )


def _model_info(source: ModelSource) -> stage_pb2.ModelInfo:
    a = source.manifest.architecture
    return stage_pb2.ModelInfo(
        digest=source.digest,
        parts=a.parts,
        positions=a.positions,
        width=a.width,
        vocabulary=a.vocabulary,
        tokenizer=source.manifest.tokenizer,
    )
