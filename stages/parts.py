"""The parts of the models that one host holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stages.alphabet import Alphabet
from stages.ar import cache_bytes
from stages.backends import DEFAULT_BACKEND, Backend, backend_named
from stages.backends.base import BlockRunner, StageRunner
from stages.bundle import check_split, find_bundle
from stages.checkpoint import load_chain_part, load_stage
from stages.errors import InputError
from stages.manifest import Manifest, read_manifest
from stages.pieces import room_for
from stages.scoring import MAX_LOGITS, most_scored

PARCEL_SPARE_BYTES = 2 << 20
"""For what travels with the largest hop: a parcel of others, accounts, paths."""
ROW_BYTES = 32
"""Beside the numbers of a row: its scale, those that travel apart, and the symbol that it is of."""


@dataclass(frozen=True)
class ModelSource:
    """One model of a bundle, before its weights are read."""

    directory: Path
    manifest: Manifest
    digest: str

    @property
    def alphabet(self) -> Alphabet:
        """What the model reads and writes."""
        return Alphabet(self.manifest.architecture.vocabulary)


@dataclass(frozen=True)
class HostPlan:
    """Which parts a host will hold: known from the manifests, before any weights are read."""

    blocks: tuple[int, ...]
    parts: int
    chain: ModelSource | None = None
    ar: ModelSource | None = None
    scorer: ModelSource | None = None

    @property
    def is_first(self) -> bool:
        return self.blocks[0] == 0

    @property
    def is_last(self) -> bool:
        return self.blocks[-1] == self.parts - 1

    @property
    def models(self) -> dict[str, ModelSource]:
        """The models that it holds parts of, by kind."""
        sources = {"chain": self.chain, "ar": self.ar, "scorer": self.scorer}
        return {kind: source for kind, source in sources.items() if source is not None}

    @property
    def weights(self) -> tuple[str, ...]:
        """Digests of chain, ar and scorer; empty where there is none. What is equal in them computes alike."""
        return tuple(source.digest if source else "" for source in (self.chain, self.ar, self.scorer))

    @property
    def pipelines(self) -> dict[str, ModelSource]:
        """Those of them that read symbols and say what follows, by kind."""
        return {kind: source for kind, source in self.models.items() if kind != "chain"}

    def model(self, kind: str) -> ModelSource | None:
        return self.models.get(kind)

    def message_bytes(self) -> int:
        """Largest message that a hop can need, with room for those that leave with it: of a sweep the features and
        estimates of a full context, of a step the hidden states of a piece and of candidates."""
        sizes = list[int]()
        if self.chain is not None:
            a = self.chain.manifest.chain_architecture
            sizes.append(a.positions * (a.width + 4 * a.code_dim + ROW_BYTES))
        for source in self.pipelines.values():
            p = source.manifest.architecture
            sizes.append((room_for(p.positions) + most_scored(p.width)) * (4 * p.width + ROW_BYTES))
        return max(sizes) + PARCEL_SPARE_BYTES


@dataclass(frozen=True)
class Parts:
    """Loaded and gated weights, ready to run, by part index."""

    plan: HostPlan
    chain: dict[int, BlockRunner]
    ar: dict[int, StageRunner]
    scorer: dict[int, StageRunner] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        """Parts of a whole model, those of other hosts included."""
        return self.plan.parts

    @property
    def chain_source(self) -> ModelSource | None:
        return self.plan.chain

    def pipeline(self, kind: str) -> dict[int, StageRunner]:
        """The stages of kind `ar` or `scorer`."""
        return self.ar if kind == "ar" else self.scorer

    def held(self, kind: str) -> list[int]:
        """Which parts of a model are here."""
        return list(self.chain if kind == "chain" else self.pipeline(kind))

    def width(self, kind: str) -> int:
        """Numbers in a hidden state of a model."""
        return self._source(kind).manifest.architecture.width

    def alphabet(self, kind: str) -> Alphabet:
        """What a model reads and writes."""
        return self._source(kind).alphabet

    def _source(self, kind: str) -> ModelSource:
        source = self.plan.model(kind)
        assert source is not None
        return source


def plan_host(checkpoint: Path, blocks: tuple[int, ...]) -> HostPlan:
    """Check a host's blocks against a checkpoint. Raises InputError or CheckpointError."""
    bundle = find_bundle(checkpoint)
    paths = {"chain": bundle.chain, "ar": bundle.ar, "scorer": bundle.scorer}
    models = {
        kind: ModelSource(path, manifest := read_manifest(path), manifest.digest())
        for kind, path in paths.items()
        if path is not None
    }
    parts = check_split({kind: source.manifest for kind, source in models.items()})
    if not blocks:
        raise InputError(f"no block given: this checkpoint has blocks 0 to {parts - 1}")
    for block in blocks:
        if not 0 <= block < parts:
            raise InputError(f"block {block} does not exist: this checkpoint has blocks 0 to {parts - 1}")
    if list(blocks) != list(range(blocks[0], blocks[0] + len(blocks))):
        raise InputError(f"blocks {','.join(map(str, blocks))} are not consecutive: a host holds neighbours, in order")
    return HostPlan(blocks, parts, **models)


def load_parts(plan: HostPlan, backend: Backend | None = None, held: Sequence[Parts] = ()) -> Parts:
    """Read this host's files, and no others; of models that are among `held`, not even these."""
    backend = backend or backend_named(DEFAULT_BACKEND)
    chains = {parts.plan.chain.digest: parts.chain for parts in held if parts.plan.chain}
    chain: dict[int, BlockRunner] = {}
    if plan.chain is not None:
        path = plan.chain.directory
        chain = chains.get(plan.chain.digest) or {i: backend.block(load_chain_part(path, i)) for i in plan.blocks}
    pipelines = {source.digest: parts.pipeline(kind) for parts in held for kind, source in parts.plan.pipelines.items()}
    for source in plan.pipelines.values():
        if source.digest not in pipelines:  # the scorer may be a copy of the AR model
            pipelines[source.digest] = {i: backend.stage(load_stage(source.directory, i)) for i in plan.blocks}
    ar, scorer = (pipelines[source.digest] if source else {} for source in (plan.ar, plan.scorer))
    return Parts(plan, chain, ar, scorer)


def full_state_bytes(plan: HostPlan) -> int:
    """Size of the largest usual sweep message: what a link is warmed with."""
    if plan.chain is None:
        return 0
    a = plan.chain.manifest.chain_architecture
    slots = min(a.positions, MAX_LOGITS // a.vocabulary)
    return slots * (a.code_dim + 4 + a.hands_on_slots * (a.width + 4))


def session_bytes(manifest: Manifest, held: Sequence[int], capacity: int) -> int:
    """KV cache bytes of one session of `capacity` positions on a host that holds the parts `held`."""
    architecture = manifest.architecture
    return cache_bytes(sum(map(architecture.layers_in, held)), architecture, capacity)
