"""Reading a part's file: exactly the tensors that were asked for, or a refusal."""

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from stages.checkpoint.checkpoint import Shapes, Types, read_weights
from stages.errors import CheckpointError

TENSORS = {"a.weight": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(1, 2, 3)}
SHAPES: Shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "part.safetensors"
    save_file(TENSORS, path, metadata={"made by": "a test"})
    return path


def read(path: Path, shapes: Shapes = SHAPES, types: Types | None = None) -> dict[str, Tensor]:
    """With a manifest that agrees with the file, whatever the file is."""
    raw = path.read_bytes()
    return read_weights(path, len(raw), hashlib.sha256(raw).hexdigest(), shapes, types)


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])
    return path


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int8, torch.uint8])
def test_a_safetensors_file_is_read_as_it_was_written(file: Path, kind: torch.dtype) -> None:
    expected = {name: (10 * tensor.abs()).to(kind) for name, tensor in TENSORS.items()}
    save_file(expected, file)
    tensors = read(file, types=dict.fromkeys(TENSORS, kind))
    file.unlink()  # pages of a mapped file stay on the disk, to be read again
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_every_flipped_bit_is_found(file: Path) -> None:
    raw = file.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    for bit in range(0, 8 * len(raw), 37):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="SHA-256: it is damaged; fetch it again"):
            read_weights(file, len(raw), digest, SHAPES)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(file: Path, keep: int) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(CheckpointError, match=f"has {len(raw[:keep])} bytes, but its manifest says {len(raw)}"):
        read_weights(file, len(raw), hashlib.sha256(raw).hexdigest(), SHAPES)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({**SHAPES, "b": (6,)}, r"tensor b has shape \(5,\), but the manifest asks for \(6,\)"),
        ({**SHAPES, "a.weight": (4, 3)}, r"tensor a.weight has shape \(3, 4\), .* asks for \(4, 3\)"),
        ({**SHAPES, "d": (1,)}, r"tensor d is missing, but the manifest asks for \(1,\)"),
        ({"b": (5,)}, r"tensor a.weight has shape \(3, 4\), but the manifest lists no such tensor"),
    ],
)
def test_tensors_that_do_not_match_the_manifest_are_refused(file: Path, shapes: Shapes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read(file, shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint8])
def test_unsupported_number_formats_are_refused(file: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in TENSORS.items()}, file)
    with pytest.raises(CheckpointError, match="it must be F32 or F16"):
        read(file)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(file: Path, number: float) -> None:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    tensors["c"][0, 1, 2] = number
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="tensor c holds values that are not finite"):
        read(file)


LAYOUTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "overlap": (lambda h: h["b"].update(data_offsets=[0, 20]), "is not at bytes"),
    "outside": (lambda h: h["b"].update(data_offsets=[10**9, 10**9 + 20]), "is not at bytes"),
    "negative": (lambda h: h["b"].update(data_offsets=[-20, 0]), "is not at bytes"),
    "fractions": (lambda h: h["b"].update(data_offsets=[0.5, 20.5]), "is not at bytes"),
    "no offsets": (lambda h: h["b"].pop("data_offsets"), "header is damaged"),
    "no shape": (lambda h: h["b"].pop("shape"), "header is damaged"),
    "no dtype": (lambda h: h["b"].pop("dtype"), "header is damaged"),
    "a list": (lambda h: h.update(b=[1, 2]), "header is damaged"),
    "a shape of text": (lambda h: h["b"].update(shape="5"), "has shape"),
    "offsets of text": (lambda h: h["b"].update(data_offsets="ab"), "header is damaged"),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_a_header_that_contradicts_the_file_is_refused(file: Path, what: str) -> None:
    change, reason = LAYOUTS[what]
    with pytest.raises(CheckpointError, match=reason):
        read(with_header(file, change))


@pytest.mark.parametrize("text", [b"[]", b"{", b"7", b"[" * 50_000, b"\xff"])
def test_an_invalid_header_is_refused(file: Path, text: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read(file)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "arbitrary.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"arbitrary\.safetensors"):
        read(path)
