"""The parts of the models that one host holds."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from stages.backends import Backend
from stages.backends.base import BlockRunner, PictureRunner, StageRunner
from stages.backends.runner_checks import OneAtATime, load_runner
from stages.backends.whole_model import WholeModel
from stages.checkpoint.bundle import check_split, find_bundle
from stages.checkpoint.checkpoint import CPU, load_block, load_picture_part
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.device import AUTO, all_cores, check_device
from stages.errors import CheckpointError, InputError
from stages.host.drafter import Drafter
from stages.model.architecture import WEIGHT_WORDS, LlamaArchitecture
from stages.model.pipeline import cache_bytes
from stages.model.prefill import max_new_tokens
from stages.model.scoring import MAX_LOGITS, most_scored
from stages.model.vocabulary import Vocabulary
from stages.pictures.part import PictureArchitecture
from stages.pictures.trajectory import evaluations, most_pictures
from stages.v1 import stage_pb2
from stages.wire.status import unavailable

log = logging.getLogger(__name__)

ModelKind = Literal["chain", "ar", "scorer", "steps"]  # the models that hosts hold parts of
MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)
PARCEL_SPARE_BYTES = 2 << 20  # for what travels with the largest hop: a parcel of others, accounts, paths
MAX_MESSAGE_BYTES = (1 << 31) - 1  # gRPC's own
USUAL_PICTURES = 4  # of a request
ROW_BYTES = 32  # beside the numbers of a row: its scale, those that travel apart, and the token that it is of


@dataclass(frozen=True)
class ModelSource:
    """One model of a bundle, before its weights are read."""

    directory: Path
    manifest: Manifest
    digest: str

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the model."""
        return Vocabulary(self.manifest.text_architecture.vocabulary)


@dataclass(frozen=True)
class HostPlan:
    """Which parts a host will hold: known from the manifests, before any weights are read."""

    blocks: tuple[int, ...]
    parts: int  # of a whole model
    models: Mapping[str, ModelSource]  # those that it holds parts of, by kind, in the order of MODEL_KINDS
    near: Path | None = None  # local/, where its model writes the tokens of `ar`

    @cached_property
    def draws(self) -> bool:
        """True where the models are of pictures."""
        return any(source.manifest.draws for source in self.models.values())

    @property
    def is_first(self) -> bool:
        return self.blocks[0] == 0

    @cached_property
    def is_last(self) -> bool:
        return self.blocks[-1] == self.parts - 1

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Digests in the order of MODEL_KINDS; empty where there is none. What is equal in them computes alike."""
        # A hop names its model by digest: where `scorer/` is a copy of `ar/`, either name gets the same answer.
        return tuple(self.models[kind].digest if kind in self.models else "" for kind in MODEL_KINDS)

    @cached_property
    def pipelines(self) -> dict[str, ModelSource]:
        """The AR pipelines among them, by kind."""
        return {kind: source for kind, source in self.models.items() if kind in ("ar", "scorer")}

    @property
    def cpu_only(self) -> str:
        """Why no GPU computes these models, and what to do; empty where one does."""
        if self.draws:
            return "models that draw compute on CPUs"
        for kind, source in self.pipelines.items():
            a = source.manifest.text_architecture
            if isinstance(a, LlamaArchitecture) and a.weights != "float32":
                return f"{WEIGHT_WORDS[a.weights]} ({kind}) compute on CPUs: import the model with --weights float32"
        return ""

    @property
    def shared_threads(self) -> int:
        """Processor threads of each of the hosts that share this machine: all cores where onnxruntime has the
        products, whose threads sleep while another host has the request; torch's spin, and take its cores."""
        architectures = [source.manifest.architecture for source in self.pipelines.values()]
        in_halves = any(isinstance(a, LlamaArchitecture) and a.weights == "bfloat16" for a in architectures)
        return 1 if in_halves or len(architectures) < len(self.models) else all_cores()

    def message_bytes(self) -> int:
        """Largest message that a hop can need, with room for those that leave with it: of a sweep the
        estimates of a full context, of a step the hidden states of a piece and of candidates, of pictures all that
        may travel."""
        if self.draws:
            largest = max(_picture_bytes(source.manifest.picture_architecture) for source in self.models.values())
            return largest + PARCEL_SPARE_BYTES
        sizes = list[int]()
        if "chain" in self.models:
            a = self.models["chain"].manifest.own_architecture
            sizes.append(a.positions * (4 * a.code_dim + ROW_BYTES))
        for source in self.pipelines.values():
            p = source.manifest.text_architecture
            sizes.append((max_new_tokens(p.positions) + most_scored(p.width)) * (4 * p.width + ROW_BYTES))
        return max(sizes) + PARCEL_SPARE_BYTES


# Of a pipeline's context that are run before the first request: pieces of more than that are never computed.
WARM_POSITIONS = 512


@dataclass(frozen=True)
class Parts:
    """Loaded and checked weights, ready to run."""

    plan: HostPlan
    # By kind of model and index: a BlockRunner, StageRunner or PictureRunner each.
    runners: Mapping[str, dict[int, Any]]
    ar_drafter: Drafter | None = None  # on the host of the last stage of `ar`
    device: torch.device = CPU  # where the weights are, and the caches of sessions with them
    # Rows of AR steps that the warm-up read in next to no time at WARM_POSITIONS, by the digest of their model.
    quick_rows: dict[str, int] = field(default_factory=dict)

    @cached_property
    def one_at_a_time(self) -> bool:
        """True where a part computes so: here, a result would depend on those beside it."""
        return any(isinstance(each, OneAtATime) for parts in self.runners.values() for each in parts.values())

    def drafter(self, kind: str) -> Drafter | None:
        """The drafter of the model of a kind; None where there is none."""
        return self.ar_drafter if kind == "ar" else None


def plan_host(checkpoint: Path, blocks: tuple[int, ...]) -> HostPlan:
    """Check a host's blocks against a checkpoint. Raises InputError or CheckpointError."""
    bundle = find_bundle(checkpoint)
    models: dict[str, ModelSource] = {
        kind: ModelSource(path, manifest := read_manifest(path), manifest.digest())
        for kind in MODEL_KINDS
        if (path := getattr(bundle, kind)) is not None
    }
    parts = check_split({kind: source.manifest for kind, source in models.items()})
    if not blocks:
        raise InputError(f"no block given: this checkpoint has blocks 0 to {parts - 1}")
    for block in blocks:
        if not 0 <= block < parts:
            raise InputError(f"block {block} does not exist: this checkpoint has blocks 0 to {parts - 1}")
    if list(blocks) != list(range(blocks[0], blocks[0] + len(blocks))):
        raise InputError(f"blocks {','.join(map(str, blocks))} are not consecutive: a host holds neighbours, in order")
    near = None
    if bundle.local is not None and "ar" in models:
        manifest = read_manifest(bundle.local)
        # a release store of before has its manifest alone
        is_here = all(part is not None and (bundle.local / part.file).is_file() for part in manifest.parts)
        if is_here and manifest.tokens == models["ar"].manifest.tokens:
            near = bundle.local
    plan = HostPlan(blocks, parts, models, near)
    if plan.message_bytes() > MAX_MESSAGE_BYTES:
        raise InputError(f"{checkpoint}: a hop of it may take {plan.message_bytes()} bytes: no message is so large")
    return plan


def check_blocks(blocks: int, parts: int) -> None:
    """Raise InputError where a topology has not as many blocks as a checkpoint has parts."""
    if blocks != parts:
        raise InputError(f"the topology has {blocks} blocks, the checkpoint {parts}: make them agree")


def check_cut(parts: int, shared: int) -> None:
    """Raise CheckpointError where a release is not cut into the parts that hosts share out."""
    if parts != shared:
        raise CheckpointError(
            f"its models are cut into {parts} parts, these hosts share out {shared}: cut it alike, "
            "or start the hosts anew with another topology"
        )


def device_for(name: str, plan: HostPlan) -> torch.device:
    """The device of a host's plan. Raises InputError for one that is not here, or that does not compute these models.

    :param name: of a device, or `auto`: a GPU where there is one that computes them.
    """
    if name == AUTO:
        return torch.device("cuda" if not plan.cpu_only and torch.cuda.is_available() else "cpu")
    device = torch.device(check_device(name))
    if device != CPU and plan.cpu_only:
        raise InputError(f"--device {name} cannot be used here: {plan.cpu_only}, or give --device cpu")
    return device


def load_parts(plan: HostPlan, backend: Backend | None = None, held: Sequence[Parts] = ()) -> Parts:
    """Read this host's files, and no others; of models that are among `held`, not even these.

    One part after the other goes to the backend's device: in the machine's memory there is never more than one of
    them beside it. Raises CheckpointError, and InputError for models that the device does not compute.
    """
    backend = backend or Backend()
    device = backend.device
    if device != CPU and plan.cpu_only:  # a release that comes later may be of another kind than the first
        raise InputError(f"this host computes on {device.type}: {plan.cpu_only}, or start it with --device cpu")
    known = {source.digest: parts.runners[kind] for parts in held for kind, source in parts.plan.models.items()}
    for kind, source in plan.models.items():
        if source.digest not in known:  # the scorer may be a copy of the AR model
            known[source.digest] = {i: _runner(kind, source, i, backend) for i in plan.blocks}
    # read anew: beside the same model, another may lie in local/
    drafter = _drafter(plan, plan.models["ar"], backend.threads) if plan.is_last and "ar" in plan.models else None
    runners = {kind: known[source.digest] for kind, source in plan.models.items()}
    return Parts(plan, runners, drafter, device)


def _runner(kind: str, source: ModelSource, index: int, backend: Backend) -> BlockRunner | StageRunner | PictureRunner:
    """One part, read now."""
    if part := source.manifest.parts[index]:
        log.info("reading part %d of %s: %.1f MB", index, kind, part.bytes / 1e6)
    if source.manifest.draws:
        return backend.picture(load_picture_part(source.directory, index))
    if kind == "chain":
        return backend.block(load_block(source.directory, index, backend.device))
    return load_runner(source.directory, index, backend.stage, backend.device)


def _drafter(plan: HostPlan, source: ModelSource, threads: int) -> Drafter:
    if plan.near is None:
        return Drafter(source.vocabulary)
    log.info("reading the near model, which drafts: %s", plan.near)
    model = WholeModel(plan.near, threads)
    assert model.stages, "read before the host is ready, not by its first draft"
    return Drafter(source.vocabulary, model)


def _picture_bytes(a: PictureArchitecture) -> int:
    """Largest hop: the hidden states of each evaluation, with E and the pictures denoised before."""
    most = max(most_pictures(a, guidance) * evaluations(guidance) for guidance in (1.0, 2.0))
    return most * a.tokens * (4 * a.features + 8 * a.patch_dim + ROW_BYTES)


def full_state_bytes(plan: HostPlan) -> int:
    """Size of the largest usual sweep message: what a link is warmed with."""
    if plan.draws:
        p = next(iter(plan.models.values())).manifest.picture_architecture
        steps_alone = "steps" in plan.models and "chain" not in plan.models
        of_a_patch = p.features + 8 * p.patch_dim if steps_alone else p.patch_dim
        return USUAL_PICTURES * p.tokens * (4 + of_a_patch)
    if "chain" not in plan.models:
        return 0
    a = plan.models["chain"].manifest.own_architecture
    slots = min(a.positions, MAX_LOGITS // a.vocabulary)
    return slots * (a.code_dim + 4)


def session_bytes(manifest: Manifest, held: Sequence[int], capacity: int) -> int:
    """Memory of one session on a host that holds the parts `held`: KV caches of `capacity` positions, or what it takes
    to evaluate `capacity` pictures at once."""
    if manifest.draws:
        a = manifest.picture_architecture
        # Four matrices of hidden states (as they came, before and after a pass, and encoded), and eight of patches:
        # noise, state, E and denoised pictures, each with its successor.
        return 4 * capacity * a.tokens * (4 * a.features + 8 * a.patch_dim)
    architecture = manifest.text_architecture
    return cache_bytes(sum(map(architecture.layers_in, held)), architecture, capacity)


# The releases that a host holds at once: new requests may use another one than those that run.
MOST_RELEASES = 2  # in memory: what requests use, and what they used before, or are about to


@dataclass(eq=False)
class Release:
    """Weights that are used together, by the name of what brought them."""

    name: str
    plan: HostPlan
    parts: Parts | None = None  # none while they are being loaded

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

        Raises StatusError while nothing is loaded.
        """
        loaded = self.loaded
        if not loaded:
            raise unavailable("this host is still loading its weights")
        return next((parts for parts in reversed(loaded) if digest in parts.plan.weights), loaded[-1])


def weights_of(release: stage_pb2.Release) -> tuple[str, ...]:
    """Like `HostPlan.weights`, from a host's description."""
    return tuple(getattr(release, kind).digest for kind in MODEL_KINDS)


def wiring_problem(plans: Sequence[HostPlan], address: str, other: stage_pb2.DescribeResponse) -> str:
    """Why `other` cannot follow a host that holds `plans` in the ring; empty when it can."""
    plan = plans[-1]
    due = (plan.blocks[-1] + 1) % plan.parts
    if not other.blocks or other.blocks[0] != due:
        return f"{address} holds blocks {list(other.blocks)}, block {due} must come next: check the topology"
    theirs = [weights_of(release) for release in other.releases]
    if not theirs:
        return f"{other.name} at {address} says nothing of its weights: run the same version of onesweep everywhere"
    if any(mine.weights in theirs for mine in plans):
        return ""
    kind, mine, found = next(row for row in zip(MODEL_KINDS, plan.weights, theirs[-1], strict=True) if row[1] != row[2])
    return (
        f"{other.name} at {address} has the {kind} checkpoint {found[:12] or '(none)'}, "
        f"this host {mine[:12] or '(none)'}: give every host the same checkpoint"
    )


def _model_info(source: ModelSource) -> stage_pb2.ModelInfo:
    if source.manifest.draws:
        p = source.manifest.picture_architecture
        pictures = stage_pb2.PictureInfo(
            height=p.height, width=p.width, channels=p.channels, patch=p.patch, classes=p.classes
        )
        return stage_pb2.ModelInfo(digest=source.digest, parts=p.parts, width=p.features, pictures=pictures)
    a = source.manifest.text_architecture
    return stage_pb2.ModelInfo(
        digest=source.digest,
        parts=a.parts,
        positions=a.positions,
        width=a.width,
        vocabulary=a.vocabulary,
        tokenizer=source.manifest.tokenizer,
    )
