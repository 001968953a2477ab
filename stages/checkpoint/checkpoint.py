"""Checkpoints: a directory with a manifest and one safetensors file for each part. Nothing is ever unpickled."""

import hashlib
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from stages.checkpoint.files import file_digest, replace_file, staged_file
from stages.checkpoint.gate import PROBE_INPUT, PROBE_OUTPUT, Measures, measured, probe_shapes, probe_tokens
from stages.checkpoint.manifest import MANIFEST_NAME, Manifest, Part, read_manifest
from stages.errors import CheckpointError, file_errors, regular
from stages.memory import require_memory
from stages.model.architecture import Architecture, PictureArchitecture
from stages.model.block import Block
from stages.model.layers import CausalStage
from stages.model.llama import LlamaStage
from stages.model.pipeline import ArModel, ArStage, PipelineStage, on_meta_device
from stages.pictures.part import PicturePart
from stages.wire.secret_files import file_lock

P = TypeVar("P")
CPU = torch.device("cpu")
AnyPart = Block | PipelineStage | PicturePart
# Computed tables may take this many bytes, or this many times the part's file if that is more.
MAX_TABLE_BYTES, TABLES_PER_WEIGHTS = 64 << 20, 4
# Tolerance for few-bit kernels' rounding beyond the manifest's own: nats, or error of hidden states. SmolLM2's states
# are off by 0.018, and by 0.07 with a tenth of its rotary base.
KERNEL_TOLERANCE = 0.01
NOUNS = {"chain": "block", "steps": "stage"}  # of a picture part, in the name of its file


# On a device, a part exists once; while it loads, it also exists once in the machine's memory, as a host loads its
# parts one by one. The probe measures parts where they will compute.
def load_part(directory: Path, index: int, device: torch.device = CPU) -> AnyPart:
    """One part of any model on `device`: digest, shapes, and its measures on the probe checked. Reads only its file."""
    part, manifest, probe = read_part(directory, index, device)
    measures, _ = measured(part, manifest, probe.get(PROBE_INPUT), probe.get(PROBE_OUTPUT))
    check_measures(directory, manifest, index, measures)
    return part


def read_part(directory: Path, index: int, device: torch.device = CPU) -> tuple[AnyPart, Manifest, dict[str, Tensor]]:
    """One part with checked digest and shapes, and its probe's tensors. The probe has not measured it yet."""
    manifest = read_manifest(directory)
    part = new_part(manifest, index)
    probe = _load(directory, manifest, index, part, device)
    return part.eval().requires_grad_(False), manifest, probe


def load_block(directory: Path, index: int, device: torch.device = CPU) -> Block:
    """Load one block of a text chain, as `load_part` does."""
    return _of_kind(load_part(directory, index, device), Block, f"{directory} holds no chain of text blocks")


def load_stage(directory: Path, index: int, device: torch.device = CPU) -> PipelineStage:
    """Load one stage of an AR pipeline, as `load_part` does."""
    return stage_of(load_part(directory, index, device), directory)


def stage_of(part: AnyPart, directory: Path) -> PipelineStage:
    """`part`, if it is a stage. Raises CheckpointError if not."""
    return cast(PipelineStage, _of_kind(part, CausalStage, f"{directory} holds no AR model"))


def load_picture_part(directory: Path, index: int) -> PicturePart:
    """Load one part of a picture model, as `load_part` does."""
    return _of_kind(load_part(directory, index), PicturePart, f"part {index} of {directory} is not of a picture model")


def _of_kind(part: AnyPart, kind: type[P], otherwise: str) -> P:
    if not isinstance(part, kind):
        raise CheckpointError(otherwise)
    return part


def new_part(manifest: Manifest, index: int) -> AnyPart:
    """A part without memory: shapes only."""
    with on_meta_device():
        if isinstance(manifest.architecture, PictureArchitecture):
            assert manifest.kind != "ar"
            return PicturePart(manifest.architecture, index, manifest.kind)
        if manifest.kind == "ar":
            a = manifest.text_architecture
            return ArStage(a, index) if isinstance(a, Architecture) else LlamaStage(a, index)
        assert manifest.codes is not None
        return Block(manifest.own_architecture, index, manifest.codes)


def load_ar(directory: Path) -> ArModel:
    """All stages of an AR model that was trained here, for one process."""
    architecture = read_manifest(directory).own_architecture
    return ArModel(architecture, [cast(ArStage, load_stage(directory, i)) for i in range(architecture.parts)])


def load_chain(directory: Path) -> list[Block]:
    """All blocks of a chain, for one process."""
    return [load_block(directory, i) for i in range(read_manifest(directory).architecture.parts)]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Create or replace the manifest, atomically. Raises CheckpointError if it cannot be written."""
    with file_errors(CheckpointError, f"cannot create the directory {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / MANIFEST_NAME, lambda path: path.write_text(manifest.to_json(), encoding="utf-8"))


def update_manifest(directory: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Read, change and replace the manifest under a lock, so that workers on one directory lose none of each other's
    changes."""
    read_manifest(directory)  # reports any problem with the directory
    with file_lock(directory / MANIFEST_NAME):
        manifest = change(read_manifest(directory))
        write_manifest(directory, manifest)
        return manifest


def save_parts(directory: Path, parts: Sequence[AnyPart]) -> None:
    """Save all parts of a model in the checkpoint in `directory`, whose manifest must exist."""
    hidden: Tensor | None = None
    for part in parts:
        hidden = save_part(directory, part, hidden)


def save_part(directory: Path, part: AnyPart, hidden: Tensor | None = None, half: bool = False) -> Tensor | None:
    """Save a part in the checkpoint in `directory`, whose manifest must exist.

    hidden: the previous stage's output for the probe, None for a part that reads none; half: save in 16 bits, to which
    the part is rounded. Returns this part's output for the probe, if another part may read that.
    """
    if half:  # measure the weights as they will be read
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.copy_(parameter.half())
    measures, out = measured(part, read_manifest(directory), hidden)
    if not all(map(math.isfinite, measures.values())):
        raise CheckpointError("the loss of these weights on the probe text is not finite: they are damaged")
    probe = {PROBE_INPUT: hidden, PROBE_OUTPUT: out}
    extra = {name: tensor for name in probe_shapes(part, 0) if (tensor := probe[name]) is not None}
    noun = "block" if isinstance(part, Block) else "stage"
    noun = NOUNS[part.kind] if isinstance(part, PicturePart) else noun
    _write_part(directory, part, noun, extra, measures, half)
    return None if isinstance(part, PicturePart) and part.has_head else out


def halve(source: Path, out: Path) -> Manifest:
    """Write the checkpoint in `source` to `out`, with weights in 16 bits. Raises OnesweepError."""
    manifest = read_manifest(source)
    write_manifest(out, replace(manifest, parts=(None,) * len(manifest.parts)))
    for name in manifest.files:
        replace_file(out / name, partial(shutil.copyfile, source / name))
    before: Tensor | None = None
    for index in range(len(manifest.parts)):
        before = save_part(out, load_part(source, index), before, half=True)
    return read_manifest(out)


def _write_part(
    directory: Path, module: AnyPart, noun: str, extra: dict[str, Tensor], measures: Measures, half: bool
) -> None:
    """Write a part's file, named after its digest: the old file stays until the manifest points to the new one."""
    weights = module.state_dict()
    if half:
        weights = {name: x.half() if x.dtype is torch.float32 else x for name, x in weights.items()}
    tensors = weights | extra
    stem = f"{noun}-{module.index}"
    with staged_file(directory / f"{stem}.safetensors", lambda path: write_weights(path, tensors)) as staged:
        digest = file_digest(staged)
        part = Part(f"{stem}-{digest[:12]}.safetensors", digest, staged.stat().st_size, measures)
        staged.replace(directory / part.file)
    try:
        update_manifest(directory, lambda manifest: manifest.with_part(module.index, part))
    finally:
        _drop_orphans(directory, module.index, stem)


def _drop_orphans(directory: Path, index: int, stem: str) -> None:
    """Remove a part's files that the manifest does not name, including those of a killed process."""
    part = read_manifest(directory).parts[index]
    for pattern in (f"{stem}-*.safetensors", f".{stem}.safetensors.*"):
        for path in directory.glob(pattern):
            if part is None or path.name != part.file:
                path.unlink(missing_ok=True)


def _load(directory: Path, manifest: Manifest, index: int, module: AnyPart, device: torch.device) -> dict[str, Tensor]:
    """Fill `module` (a `new_part`) from the part's file and move it to `device`; return the probe's tensors there."""
    part = _part(directory, manifest, index)
    check_size(directory, part, module)
    wanted = module.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    types = {name: tensor.dtype for name, tensor in wanted.items() if tensor.dtype is not torch.float32}
    require_memory(sum(tensor.nbytes for tensor in wanted.values()), f"part {index} of {directory}")
    probe_only = probe_shapes(module, 0 if manifest.draws else probe_tokens(manifest).shape[1])
    tensors = read_weights(directory / part.file, part.bytes, part.sha256, shapes | probe_only, types)
    probe = {name: tensors.pop(name) for name in probe_only}
    module.load_state_dict(tensors, assign=True)
    module.restore_tables()
    if device == CPU:
        return probe
    try:
        module.to(device)
        return {name: x.to(device) for name, x in probe.items()}
    except torch.OutOfMemoryError:
        raise CheckpointError(
            f"not enough memory on {device} for part {index} of {directory}: "
            "cut the model into more parts, or give --device cpu"
        ) from None


def check_size(directory: Path, part: Part, module: AnyPart) -> None:
    """Raise CheckpointError if the part's file is too small for `module` (from `new_part`), or for its tables.

    No file contains tables (rotary angles, codes): their size is compared with that of the weights."""
    stored = module.state_dict()
    least = sum(t.nbytes // 2 if t.dtype is torch.float32 else t.nbytes for t in stored.values())  # 16 bits are read
    tables = sum(t.nbytes for name, t in module.named_buffers() if name not in stored)
    if part.bytes < least or tables > max(MAX_TABLE_BYTES, TABLES_PER_WEIGHTS * part.bytes):
        raise CheckpointError(
            f"the manifest gives {directory / part.file} {part.bytes} bytes, but asks for weights of at least "
            f"{least} and context tables of {tables}: one of the two is damaged or from another model; fetch both again"
        )


def _part(directory: Path, manifest: Manifest, index: int) -> Part:
    count = len(manifest.parts)
    if not 0 <= index < count:
        raise CheckpointError(f"part {index} does not exist: {directory} has parts 0 to {count - 1}")
    part = manifest.parts[index]
    if part is None:
        raise CheckpointError(f"part {index} of {directory} has no weights yet")
    return part


def check_measures(directory: Path, manifest: Manifest, index: int, measures: Measures, beyond: float = 0.0) -> None:
    """Raise CheckpointError unless a part's measures equal those in its manifest, within the manifest's tolerance plus
    `beyond`."""
    recorded, tolerance = _part(directory, manifest, index).probe, manifest.probe_tolerance + beyond
    for name, value in measures.items():
        expected = recorded.get(name, math.nan)
        if not abs(value - expected) <= tolerance:  # true for NaN too
            hint = ""
            if not manifest.draws:
                vocabulary = manifest.text_architecture.vocabulary
                hint = f"; ln({vocabulary}) = {math.log(vocabulary):.3f} is the loss of untrained weights"
            raise CheckpointError(
                f"{directory}: part {index} is refused: {name} on the probe is {value:.4f}, the manifest recorded "
                f"{expected:.4f} (tolerance {tolerance:.2g}{hint}): "
                "the weights do not match the manifest; fetch both again"
            )


# A part's safetensors file.
MAX_HEADER_BYTES = 1 << 20

# Names of the format's types that can be read. Where float32 is wanted, weights of 16 bits take half the space on disk,
# and the same in memory.
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}

Shapes = dict[str, tuple[int, ...]]
Types = Mapping[str, torch.dtype]  # types of tensors that are not float32

# The safetensors library maps its file. If someone wrote over the file after its digest was checked, weights would
# change under a running host, or kill it; and a copy of them needs the part's memory twice. Here the digest and the
# tensors come from one open file. Weights of a few bits, most of a large model, are mapped nevertheless: a host lays
# them out anew, and reads only a few rows of an embedding.
MAPPED = (torch.int8, torch.uint8, torch.float16)


def read_weights(path: Path, size: int, sha256: str, expected: Shapes, types: Types | None = None) -> dict[str, Tensor]:
    """The tensors of `path`, as float32 or as `types` says.

    Raises CheckpointError unless the file has `size` bytes, the digest `sha256`, and exactly the tensors of
    `expected` (name -> shape), each float32 or float16 or as `types` says, and finite.
    """
    try:
        with regular(path).open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise CheckpointError(f"{path} has {found} bytes, but its manifest says {size}: fetch it again")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointError(f"{path} does not match its manifest's SHA-256: it is damaged; fetch it again")
            file.seek(0)
            return _read(file, path, size, expected, types or {})
    except (FileNotFoundError, IsADirectoryError):
        raise CheckpointError(f"{path} is missing; fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _read(file: BufferedReader, path: Path, size: int, expected: Shapes, types: Types) -> dict[str, Tensor]:
    """The format: header length (8 bytes, little-endian), header (JSON), then the tensors without gaps."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is not a safetensors file: its header would take {length} bytes")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        found = {name: tuple(entry["shape"]) for name, entry in entries}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                held = f"has shape {found[name]}" if name in found else "is missing"
                wanted = f"asks for {expected[name]}" if name in expected else "lists no such tensor"
                raise CheckpointError(f"{path}: tensor {name} {held}, but the manifest {wanted}; fetch it again")
        _check_layout(path, entries, size - 8 - length, types)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is damaged ({error})") from None
    return {
        name: _read_tensor(file, path, name, expected[name], entry["dtype"], types.get(name, torch.float32))
        for name, entry in entries
    }


def _check_layout(path: Path, entries: list[tuple[str, Any]], data_bytes: int, types: Types) -> None:
    end = 0
    for name, entry in entries:
        wanted = {types[name]} if name in types else {torch.float32, torch.float16}
        if TYPES.get(entry["dtype"]) not in wanted:
            names = " or ".join(stored for stored, kind in TYPES.items() if kind in wanted)
            raise CheckpointError(f"{path}: tensor {name} is {entry['dtype']}; it must be {names}")
        begin, end = end, end + TYPES[entry["dtype"]].itemsize * math.prod(entry["shape"])
        if entry["data_offsets"] != [begin, end]:
            raise CheckpointError(f"{path}: tensor {name} is not at bytes {begin} to {end} of the data; fetch it again")
    if end != data_bytes:
        raise CheckpointError(f"{path} holds {data_bytes} bytes of data, but its tensors take {end}; fetch it again")


def _read_tensor(
    file: BufferedReader, path: Path, name: str, shape: tuple[int, ...], stored: str, wanted: torch.dtype
) -> Tensor:
    count, mapping = math.prod(shape), None
    if TYPES[stored] in MAPPED and count:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensor = torch.frombuffer(mapping, dtype=TYPES[stored], count=count, offset=file.tell())
        file.seek(tensor.nbytes, os.SEEK_CUR)
    else:
        # torch's own alignment, as for new weights: kernels depend on it
        tensor = torch.empty(count, dtype=TYPES[stored])
        if file.readinto(tensor.view(torch.uint8).numpy().data) != tensor.nbytes:
            raise CheckpointError(f"{path} ends within tensor {name}; fetch it again")
    tensor = tensor.to(wanted)
    low, high = tensor.aminmax()  # both are NaN if any number is; needs no copy
    if not -math.inf < low <= high < math.inf:
        raise CheckpointError(f"{path}: tensor {name} holds values that are not finite; fetch it again")
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)  # a page that is read again is read from the file
    return tensor.view(shape)


ALIGNMENT = 8  # of the tensors in a written file


# Written tensor by tensor: safetensors' own writer holds all of them twice.
def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file for `read_weights`. tensors: of TYPES, on any device. Raises OSError."""
    names = {kind: name for name, kind in TYPES.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
