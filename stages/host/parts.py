"""The parts of the models that one host holds."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from stages.backends import Backend
from stages.backends.base import BlockRunner, PictureRunner, StageRunner
from stages.backends.runner_checks import OneAtATime, load_runner
from stages.backends.whole_model import WholeModel
from stages.checkpoint.checkpoint import CPU, load_block, load_picture_part
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import InputError
from stages.host.drafter import Drafter
from stages.host.plan import HostPlan, ModelSource
from stages.model.pipeline import cache_bytes
from stages.v1 import stage_pb2
from stages.wire.status import unavailable

log = logging.getLogger(__name__)

# Positions of a pipeline's context that the warm-up runs: no piece has more.
WARM_POSITIONS = 512


@dataclass(frozen=True)
class Parts:
    """Loaded and checked weights, ready to run."""

    plan: HostPlan
    # By kind of model and index: a BlockRunner, StageRunner or PictureRunner each.
    runners: Mapping[str, dict[int, Any]]
    ar_drafter: Drafter | None = None  # only on the host of the last stage of `ar`
    device: torch.device = CPU  # holds the weights, and the caches of their sessions
    # Rows of AR steps that the warm-up read within QUICK_MS at WARM_POSITIONS, by the digest of their model.
    quick_rows: dict[str, int] = field(default_factory=dict)

    @cached_property
    def one_at_a_time(self) -> bool:
        """True if a part computes one hop at a time: here, a result would depend on the rest of its batch."""
        return any(isinstance(each, OneAtATime) for parts in self.runners.values() for each in parts.values())

    def drafter(self, kind: str) -> Drafter | None:
        """The drafter of the model of a kind; None where there is none."""
        return self.ar_drafter if kind == "ar" else None


def load_parts(plan: HostPlan, backend: Backend | None = None, held: Sequence[Parts] = ()) -> Parts:
    """Read this host's files, and no others; skip the files of models that `held` already contains.

    Parts move to the backend's device one after another: the machine's memory never holds more than one of them in
    addition. Raises CheckpointError, and InputError for models that the device does not compute.
    """
    backend = backend or Backend()
    device = backend.device
    if device != CPU and plan.cpu_only:  # a later release may be of another kind than the first
        raise InputError(f"this host computes on {device.type}: {plan.cpu_only}, or start it with --device cpu")
    known = {source.digest: parts.runners[kind] for parts in held for kind, source in parts.plan.models.items()}
    for kind, source in plan.models.items():
        if source.digest not in known:  # the scorer may be a copy of the AR model
            known[source.digest] = {i: _runner(kind, source, i, backend) for i in plan.blocks}
    # always read: local/ may hold another drafter for the same model
    drafter = _drafter(plan, plan.models["ar"], backend.threads) if plan.is_last and "ar" in plan.models else None
    runners = {kind: known[source.digest] for kind, source in plan.models.items()}
    return Parts(plan, runners, drafter, device)


def _runner(kind: str, source: ModelSource, index: int, backend: Backend) -> BlockRunner | StageRunner | PictureRunner:
    """Read one part."""
    if part := source.manifest.parts[index]:
        log.info("reading part %d of %s: %.1f MB", index, kind, part.bytes / 1e6)
    if source.manifest.draws:
        return backend.picture(load_picture_part(source.directory, index))
    if kind == "chain":
        return backend.block(load_block(source.directory, index, backend.device))
    return load_runner(source.directory, index, backend.stage, backend.device)


def _drafter(plan: HostPlan, source: ModelSource, threads: int) -> Drafter:
    directory = plan.draft_model
    if directory is None:
        return Drafter(source.vocabulary)
    if not all(part is not None and (directory / part.file).is_file() for part in read_manifest(directory).parts):
        log.warning("the draft model %s has no weights: drafting without it; fetch it again", directory)
        return Drafter(source.vocabulary)
    log.info("reading the draft model: %s", directory)
    model = WholeModel(directory, threads)
    assert model.stages, "read before the host is ready, not by its first draft"
    return Drafter(source.vocabulary, model)


def session_bytes(manifest: Manifest, held: Sequence[int], capacity: int) -> int:
    """Bytes of one session on a host that holds the parts `held`: KV caches of `capacity` positions, or the memory to
    evaluate `capacity` pictures at once."""
    if manifest.draws:
        a = manifest.picture_architecture
        # Four matrices of hidden states (as received, before and after a pass, and encoded), and eight of patches:
        # noise, state, E and denoised pictures, each with its successor.
        return 4 * capacity * a.tokens * (4 * a.features + 8 * a.patch_dim)
    architecture = manifest.text_architecture
    return cache_bytes(sum(map(architecture.layers_in, held)), architecture, capacity)


@dataclass(eq=False)
class Release:
    """Weights that are used together, under one name."""

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
        """The parts of the model with digest `digest`; those of the newest release if no model has it.

        Raises StatusError while nothing is loaded.
        """
        loaded = self.loaded
        if not loaded:
            raise unavailable("this host is still loading its weights")
        return next((parts for parts in reversed(loaded) if digest in parts.plan.weights), loaded[-1])


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
