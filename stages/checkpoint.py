"""Checkpoints: a directory with a manifest and one safetensors file for each part. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.ar import ArModel, ArStage
from stages.architecture import VOCABULARY
from stages.block import Block
from stages.errors import CheckpointError
from stages.manifest import MANIFEST_NAME, Manifest, Part, read_manifest
from stages.probe import PROBE_INPUT, PROBE_OUTPUT, Measures, probe_block, probe_stage

_PROBE_TENSORS = (PROBE_INPUT, PROBE_OUTPUT)


def load_block(directory: Path, index: int) -> Block:
    """One block of a chain, digest, shapes and loss checked. Reads that block's file only."""
    manifest = read_manifest(directory)
    if manifest.kind != "chain" or manifest.codes is None or manifest.partition is None:
        raise CheckpointError(f"{directory} holds an AR model, not a chain of blocks")
    with torch.device("meta"):
        block = Block(manifest.architecture, index, manifest.codes)
    block.restore_tables(manifest.codes)
    probe = _load(directory, manifest, index, block)
    measured, _ = probe_block(block, manifest.partition, manifest.probe_text, probe.get(PROBE_INPUT))
    _gate(directory, manifest, index, measured)
    return block.eval().requires_grad_(False)


def load_stage(directory: Path, index: int) -> ArStage:
    """One stage of an AR pipeline, checked like a block. Reads that stage's file only."""
    manifest = read_manifest(directory)
    if manifest.kind != "ar":
        raise CheckpointError(f"{directory} holds a chain of blocks, not an AR model")
    with torch.device("meta"):
        stage = ArStage(manifest.architecture, index)
    stage.restore_tables()
    probe = _load(directory, manifest, index, stage)
    measured, _ = probe_stage(stage, manifest.probe_text, probe.get(PROBE_INPUT), probe.get(PROBE_OUTPUT))
    _gate(directory, manifest, index, measured)
    return stage.eval().requires_grad_(False)


def load_ar(directory: Path) -> ArModel:
    """All stages of an AR model, for one process."""
    manifest = read_manifest(directory)
    with torch.device("meta"):
        model = ArModel(manifest.architecture)
    model.stages = nn.ModuleList(load_stage(directory, i) for i in range(manifest.architecture.parts))
    return model


def load_chain(directory: Path) -> list[Block]:
    """All blocks of a chain, for one process."""
    return [load_block(directory, i) for i in range(read_manifest(directory).architecture.parts)]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Create or replace the manifest, atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / MANIFEST_NAME, lambda path: path.write_text(manifest.to_json(), encoding="utf-8"))


def save_block(directory: Path, block: Block, features: Tensor | None = None) -> Tensor:
    """Put a block into the checkpoint in `directory`, whose manifest must exist.

    features: the block before's clean features on the probe text, for a `chained` block. Returns this block's own.
    """
    manifest = read_manifest(directory)
    assert manifest.partition is not None
    measures, out = probe_block(block, manifest.partition, manifest.probe_text, features)
    extra = {} if features is None else {PROBE_INPUT: features}
    _save_part(directory, manifest, block.index, "block", block, extra, measures)
    return out


def save_ar(directory: Path, model: ArModel) -> None:
    """Put every stage of an AR model into the checkpoint in `directory`, whose manifest must exist."""
    hidden: Tensor | None = None
    for stage in model.stages:
        manifest = read_manifest(directory)
        measures, out = probe_stage(stage, manifest.probe_text, hidden)
        extra = {} if hidden is None else {PROBE_INPUT: hidden}
        if not stage.is_last:
            extra[PROBE_OUTPUT] = out
        _save_part(directory, manifest, stage.index, "stage", stage, extra, measures)
        hidden = out


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write `path` through a temporary file beside it, so that a crash or a full disk leaves the old one whole.

    Raises CheckpointError with the reason when it cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot save {path}: {error}; what was saved before is untouched, free some space and go on"
        ) from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _save_part(
    directory: Path,
    manifest: Manifest,
    index: int,
    noun: str,
    module: nn.Module,
    extra: dict[str, Tensor],
    measures: Measures,
) -> None:
    """The file's name holds its digest: the old file stays until the manifest points to the new one."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in (module.state_dict() | extra).items()}
    staging = directory / f"{noun}-{index}.safetensors"
    replace_file(staging, lambda path: save_file(tensors, path))
    digest = file_digest(staging)
    name = f"{noun}-{index}-{digest[:12]}.safetensors"
    staging.replace(directory / name)
    part = Part(name, digest, (directory / name).stat().st_size, measures)
    parts = tuple(part if i == index else old for i, old in enumerate(manifest.parts))
    write_manifest(directory, replace(manifest, parts=parts))
    previous = manifest.parts[index]
    if previous is not None and previous.file != name:
        (directory / previous.file).unlink(missing_ok=True)


def _load(directory: Path, manifest: Manifest, index: int, module: nn.Module) -> dict[str, Tensor]:
    """Fill `module` (on the meta device) from the part's file; return the probe's tensors."""
    path = _checked_file(directory, manifest, index)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_shapes(path, expected, {k: v for k, v in shapes.items() if k not in _PROBE_TENSORS})
            tensors = {name: file.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from None
    probe = {name: tensors.pop(name) for name in _PROBE_TENSORS if name in tensors}
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return probe


def _checked_file(directory: Path, manifest: Manifest, index: int) -> Path:
    count = manifest.architecture.parts
    if not 0 <= index < count:
        raise CheckpointError(f"{directory} has parts 0 to {count - 1}; there is no part {index}")
    part = manifest.parts[index]
    if part is None:
        raise CheckpointError(f"part {index} of {directory} is not trained yet")
    path = directory / part.file
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; fetch it again")
    size = path.stat().st_size
    if size != part.bytes:
        raise CheckpointError(f"{path} has {size} bytes, its manifest says {part.bytes}: it is cut off; fetch it again")
    if file_digest(path) != part.sha256:
        raise CheckpointError(f"{path} does not have the SHA-256 of its manifest: it is damaged; fetch it again")
    return path


def _check_shapes(path: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{path}: tensor {name} has shape {found.get(name, 'none')}, "
                f"the manifest's architecture asks for {expected.get(name, 'none')}"
            )


def _gate(directory: Path, manifest: Manifest, index: int, measured: Measures) -> None:
    part = manifest.parts[index]
    assert part is not None
    for name, recorded in part.probe.items():
        value = measured.get(name, math.nan)
        if not abs(value - recorded) <= manifest.probe_tolerance:
            raise CheckpointError(
                f"{directory}: part {index} is refused: {name} on the probe text is {value:.4f}, the manifest recorded "
                f"{recorded:.4f} (tolerance {manifest.probe_tolerance}; ln({VOCABULARY}) = {math.log(VOCABULARY):.3f} "
                "is what untrained weights give): the weights do not mean what the manifest says"
            )


def describe(directory: Path) -> str:
    """The manifest as indented JSON, for people."""
    return json.dumps(json.loads(read_manifest(directory).to_json()), indent=2)
