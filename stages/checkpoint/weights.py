"""Reading and writing a part's safetensors file."""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.errors import CheckpointError, regular

MAX_HEADER_BYTES = 1 << 20

# Names of the format's types that are read. Where float32 is wanted, weights of 16 bits take half the room on a disk,
# and the same in memory.
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}

Shapes = dict[str, tuple[int, ...]]
Types = Mapping[str, torch.dtype]  # of tensors that are not float32

# The safetensors library maps its file: weights would change under a running host, or kill it, when somebody writes
# over the file after its digest was checked, and a copy of them needs the part's memory twice. Here the digest and the
# tensors come from one open file. Weights of a few bits, most of a large model, are mapped all the same: a host lays
# them out anew, and of an embedding it reads a few rows.
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
                raise CheckpointError(f"{path} has {found} bytes, its manifest says {size}: fetch it again")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointError(f"{path} does not have its manifest's SHA-256: it is damaged; fetch it again")
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
        raise CheckpointError(f"{path} is no safetensors file: its header would take {length} bytes")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        found = {name: tuple(entry["shape"]) for name, entry in entries}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                held = f"has shape {found[name]}" if name in found else "is missing"
                wanted = f"asks for {expected[name]}" if name in expected else "has none of this name"
                raise CheckpointError(f"{path}: tensor {name} {held}, the manifest {wanted}; fetch it again")
        _check_layout(path, entries, size - 8 - length, types)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is damaged ({error})") from None
    return {
        name: _read_tensor(file, path, name, expected[name], entry["dtype"], types.get(name, torch.float32))
        for name, entry in entries
    }


def _check_layout(path: Path, entries: list[tuple[str, Any]], data_bytes: int, types: Types) -> None:
    end = 0
    for name, entry in entries:
        wanted = {types[name]} if name in types else {torch.float32, torch.float16}
        if TYPES.get(entry["dtype"]) not in wanted:
            names = " and ".join(stored for stored, kind in TYPES.items() if kind in wanted)
            raise CheckpointError(f"{path}: tensor {name} is {entry['dtype']}; only {names} are read")
        begin, end = end, end + TYPES[entry["dtype"]].itemsize * math.prod(entry["shape"])
        if entry["data_offsets"] != [begin, end]:
            raise CheckpointError(f"{path}: tensor {name} is not at bytes {begin} to {end} of the data; fetch it again")
    if end != data_bytes:
        raise CheckpointError(f"{path} holds {data_bytes} bytes of data, its tensors take {end}; fetch it again")


def _read_tensor(
    file: BufferedReader, path: Path, name: str, shape: tuple[int, ...], stored: str, wanted: torch.dtype
) -> Tensor:
    count, mapping = math.prod(shape), None
    if TYPES[stored] in MAPPED and count:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensor = torch.frombuffer(mapping, dtype=TYPES[stored], count=count, offset=file.tell())
        file.seek(tensor.nbytes, os.SEEK_CUR)
    else:
        # torch's own alignment, as for fresh weights: kernels depend on it
        tensor = torch.empty(count, dtype=TYPES[stored])
        if file.readinto(tensor.view(torch.uint8).numpy().data) != tensor.nbytes:
            raise CheckpointError(f"{path} ends within tensor {name}; fetch it again")
    tensor = tensor.to(wanted)
    low, high = tensor.aminmax()  # both NaN if any number is; needs no copy
    if not -math.inf < low <= high < math.inf:
        raise CheckpointError(f"{path}: tensor {name} holds numbers that are not finite; fetch it again")
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)  # a page that is read again comes from the file again
    return tensor.view(shape)


ALIGNMENT = 8  # of the tensors in a file that is written


# Tensor by tensor: safetensors' own writer holds all of them twice.
def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file that `read_weights` reads. tensors: of TYPES, on any device. Raises OSError."""
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
