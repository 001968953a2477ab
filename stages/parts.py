"""The parts of the models that one host holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.ar import cache_bytes
from stages.backends import DEFAULT_BACKEND, Backend, backend_named
from stages.backends.base import BlockRunner, StageRunner
from stages.bundle import check_split, find_bundle
from stages.checkpoint import load_block, load_stage
from stages.errors import InputError
from stages.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class ModelSource:
    """One model of a bundle, before its weights are read."""

    directory: Path
    manifest: Manifest
    digest: str


@dataclass(frozen=True)
class HostPlan:
    """Which parts a host will hold: known from the manifests, before any weights are read."""

    blocks: tuple[int, ...]
    parts: int
    chain: ModelSource | None
    ar: ModelSource | None

    @property
    def is_first(self) -> bool:
        return self.blocks[0] == 0

    @property
    def is_last(self) -> bool:
        return self.blocks[-1] == self.parts - 1

    def model(self, kind: str) -> ModelSource | None:
        return self.chain if kind == "chain" else self.ar

    def message_bytes(self) -> int:
        """Largest message that a hop can need: a full context of features or hidden states, with room to spare."""
        sizes = [
            source.manifest.architecture.context_bytes * (source.manifest.architecture.width + 64) * 4
            for source in (self.chain, self.ar)
            if source is not None
        ]
        return max(sizes) + (1 << 20)


@dataclass(frozen=True)
class Parts:
    """Loaded and gated weights, ready to run, by part index."""

    plan: HostPlan
    chain: dict[int, BlockRunner]
    ar: dict[int, StageRunner]

    @property
    def parts(self) -> int:
        """Parts of a whole model, those of other hosts included."""
        return self.plan.parts

    @property
    def chain_source(self) -> ModelSource | None:
        return self.plan.chain

    @property
    def ar_width(self) -> int:
        assert self.plan.ar is not None
        return self.plan.ar.manifest.architecture.width


def plan_host(checkpoint: Path, blocks: tuple[int, ...]) -> HostPlan:
    """Check a host's blocks against a checkpoint. Raises InputError or CheckpointError."""
    bundle = find_bundle(checkpoint)
    chain, ar = (
        None if path is None else ModelSource(path, manifest := read_manifest(path), manifest.digest())
        for path in (bundle.chain, bundle.ar)
    )
    parts = check_split(chain.manifest if chain else None, ar.manifest if ar else None)
    if not blocks:
        raise InputError(f"no block given: this checkpoint has blocks 0 to {parts - 1}")
    for block in blocks:
        if not 0 <= block < parts:
            raise InputError(f"block {block} does not exist: this checkpoint has blocks 0 to {parts - 1}")
    if list(blocks) != list(range(blocks[0], blocks[0] + len(blocks))):
        raise InputError(f"blocks {','.join(map(str, blocks))} are not consecutive: a host holds neighbours, in order")
    return HostPlan(blocks, parts, chain, ar)


def load_parts(plan: HostPlan, backend: Backend | None = None) -> Parts:
    """Read this host's files, and no others."""
    backend = backend or backend_named(DEFAULT_BACKEND)
    chain = {i: backend.block(load_block(plan.chain.directory, i)) for i in plan.blocks} if plan.chain else {}
    ar = {i: backend.stage(load_stage(plan.ar.directory, i)) for i in plan.blocks} if plan.ar else {}
    return Parts(plan, chain, ar)


def full_state_bytes(plan: HostPlan) -> int:
    """Size of the largest usual sweep message: what a link is warmed with."""
    if plan.chain is None:
        return 0
    a = plan.chain.manifest.architecture
    return a.context_bytes * (a.code_dim + 4)


def session_bytes(manifest: Manifest, held: int, capacity: int) -> int:
    """KV cache bytes of one session of `capacity` positions on a host that holds `held` parts."""
    architecture = manifest.architecture
    return held * cache_bytes(architecture.layers, architecture, capacity)
