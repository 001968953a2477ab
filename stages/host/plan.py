"""The plan of one host: the parts of models that it will hold, known before weights are read. This module must not
import torch: commands and routers plan, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from stages.checkpoint.bundle import check_split, find_bundle
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.device import AUTO, all_cores, check_device
from stages.errors import CheckpointError, InputError
from stages.model.architecture import WEIGHT_WORDS, LlamaArchitecture, PictureArchitecture
from stages.model.prefill import max_new_tokens
from stages.model.scoring import MAX_LOGITS, max_scored
from stages.model.vocabulary import Vocabulary
from stages.pictures.trajectory import evaluations, max_pictures
from stages.v1 import stage_pb2

if TYPE_CHECKING:
    import torch

ModelKind = Literal["chain", "ar", "scorer", "steps"]  # the models that hosts hold parts of
MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)
BATCH_SPARE_BYTES = 2 << 20  # for what travels with the largest hop: a batch of other hops, timings, paths
MAX_MESSAGE_BYTES = (1 << 31) - 1  # gRPC's own limit
USUAL_PICTURES = 4  # in a request
ROW_BYTES = 32  # in addition to a row's numbers: its scale, the numbers sent separately, and its token


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
        return Vocabulary(self.manifest.text_architecture.vocabulary)


@dataclass(frozen=True)
class HostPlan:
    """The parts that a host will hold, known from the manifests before any weights are read."""

    blocks: tuple[int, ...]
    parts: int  # of a whole model
    models: Mapping[str, ModelSource]  # models that it holds parts of, by kind, in the order of MODEL_KINDS
    draft_model: Path | None = None  # local/, if its model uses the vocabulary of `ar`

    @cached_property
    def draws(self) -> bool:
        """True if the models draw pictures."""
        return any(source.manifest.draws for source in self.models.values())

    @property
    def is_first(self) -> bool:
        return self.blocks[0] == 0

    @cached_property
    def is_last(self) -> bool:
        return self.blocks[-1] == self.parts - 1

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Digests in the order of MODEL_KINDS; empty where there is none. Models with equal digests compute alike."""
        # A hop names its model by digest: where `scorer/` is a copy of `ar/`, either name gets the same answer.
        return tuple(self.models[kind].digest if kind in self.models else "" for kind in MODEL_KINDS)

    @cached_property
    def pipelines(self) -> dict[str, ModelSource]:
        """The AR pipelines among the models, by kind."""
        return {kind: source for kind, source in self.models.items() if kind in ("ar", "scorer")}

    @property
    def cpu_only(self) -> str:
        """Why no GPU computes these models, and what to do; empty if one can."""
        if self.draws:
            return "picture models run only on CPUs: leave --device at auto"
        for kind, source in self.pipelines.items():
            a = source.manifest.text_architecture
            if isinstance(a, LlamaArchitecture) and a.weights != "float32":
                return f"{WEIGHT_WORDS[a.weights]} ({kind}) run only on CPUs: import the model with --weights float32"
        return ""

    @property
    def shared_threads(self) -> int:
        """Processor threads of each of the hosts that share this machine. All cores where onnxruntime computes the
        products: its threads sleep while another host has the request; torch's spin, and take its cores."""
        architectures = [source.manifest.architecture for source in self.pipelines.values()]
        in_halves = any(isinstance(a, LlamaArchitecture) and a.weights == "bfloat16" for a in architectures)
        return 1 if in_halves or len(architectures) < len(self.models) else all_cores()

    def message_bytes(self) -> int:
        """Largest message that a hop can need, with room for what leaves with it: for a sweep the estimates of a full
        context, for a step the hidden states of a piece and of candidates, for pictures as many as may travel
        together."""
        if self.draws:
            largest = max(_picture_bytes(source.manifest.picture_architecture) for source in self.models.values())
            return largest + BATCH_SPARE_BYTES
        sizes = list[int]()
        if "chain" in self.models:
            a = self.models["chain"].manifest.own_architecture
            sizes.append(a.positions * (4 * a.code_dim + ROW_BYTES))
        for source in self.pipelines.values():
            p = source.manifest.text_architecture
            sizes.append((max_new_tokens(p.positions) + max_scored(p.width)) * (4 * p.width + ROW_BYTES))
        return max(sizes) + BATCH_SPARE_BYTES


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
        raise InputError(f"blocks {','.join(map(str, blocks))} are not consecutive: give a host neighbours, in order")
    near, ar = bundle.local, models.get("ar")
    drafts = near is not None and ar is not None and read_manifest(near).tokens == ar.manifest.tokens
    plan = HostPlan(blocks, parts, models, near if drafts else None)
    if plan.message_bytes() > MAX_MESSAGE_BYTES:
        raise InputError(f"{checkpoint}: a hop may take {plan.message_bytes()} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return plan


def check_blocks(blocks: int, parts: int, where: object = "the checkpoint") -> None:
    """Raise InputError unless a topology has as many blocks as the checkpoint `where` has parts."""
    if blocks != parts:
        raise InputError(f"the block count is {blocks} in the topology, but {parts} in {where}: make them agree")


def check_cut(parts: int, shared: int) -> None:
    """Raise CheckpointError unless a release is cut into the parts that the hosts divide among them."""
    if parts != shared:
        raise CheckpointError(
            f"its models are cut into {parts} parts, but these hosts share {shared}: cut it to match, "
            "or restart the hosts with another topology"
        )


def device_for(name: str, plan: HostPlan) -> "torch.device":
    """The device of a host's plan. Raises InputError if it is missing, or cannot compute these models.

    :param name: of a device, or `auto`: a GPU if one can compute them.
    """
    import torch

    if name == AUTO:
        return torch.device("cuda" if not plan.cpu_only and torch.cuda.is_available() else "cpu")
    device = torch.device(check_device(name))
    if device.type != "cpu" and plan.cpu_only:
        raise InputError(f"--device {name} cannot be used here: {plan.cpu_only}, or give --device cpu")
    return device


def _picture_bytes(a: PictureArchitecture) -> int:
    """Largest hop: the hidden states of each evaluation, with E and the pictures denoised at the level before."""
    most = max(max_pictures(a, guidance) * evaluations(guidance) for guidance in (1.0, 2.0))
    return most * a.tokens * (4 * a.features + 8 * a.patch_dim + ROW_BYTES)


def full_state_bytes(plan: HostPlan) -> int:
    """Size of the largest usual sweep message, which warms a link."""
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


def weights_of(release: stage_pb2.Release) -> tuple[str, ...]:
    """Like `HostPlan.weights`, from a host's description."""
    return tuple(getattr(release, kind).digest for kind in MODEL_KINDS)


def wiring_problem(plans: Sequence[HostPlan], address: str, other: stage_pb2.DescribeResponse) -> str:
    """Why `other` cannot follow a host that holds `plans` in the ring; empty if it can."""
    plan = plans[-1]
    next_block = (plan.blocks[-1] + 1) % plan.parts
    if not other.blocks or other.blocks[0] != next_block:
        return f"{address} holds blocks {list(other.blocks)}, but block {next_block} must come next: check the topology"
    held = [weights_of(release) for release in other.releases]
    if not held:
        return f"{other.name} at {address} does not report its weights: run the same version of onesweep everywhere"
    if any(mine.weights in held for mine in plans):
        return ""
    kind, mine, found = next(row for row in zip(MODEL_KINDS, plan.weights, held[-1], strict=True) if row[1] != row[2])
    return (
        f"{other.name} at {address} has the {kind} checkpoint {found[:12] or '(none)'}, "
        f"this host {mine[:12] or '(none)'}: give every host the same checkpoint"
    )
