"""GGUF files with false metadata: each is refused in a sentence, and at once."""

import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

from stages.errors import CheckpointError
from tests.stages.importing.published import letters_metadata, write_gguf

KINDS = b"tokenizer.ggml.token_type"
"""Followed by the type of the field (array), that of its elements and their count."""
Weights = dict[str, Tensor]


@pytest.fixture
def file(weights: Weights, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", weights)


def put(path: Path, before: bytes, skipped: int, content: bytes) -> None:
    """Overwrite what comes so many bytes after the first `before`."""
    whole = bytearray(path.read_bytes())
    at = whole.index(before) + len(before) + skipped
    whole[at : at + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9, 0.999])
def test_a_truncated_file_is_refused(imported: Any, file: Path, share: float) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"is damaged .it ends too soon.; fetch it again"):
        imported(file)


@pytest.mark.parametrize("element", [0, 9], ids=["bytes", "arrays"])
def test_an_array_count_beyond_the_file_is_refused(imported: Any, file: Path, element: int) -> None:
    put(file, KINDS, 4, struct.pack("<IQ", element, 1 << 62))
    with pytest.raises(CheckpointError, match=r"is damaged .an array has 4611686018427387904 elements; the limit is 4"):
        imported(file)
    put(file, KINDS, 4, struct.pack("<IQ", 0, 1 << 22))
    with pytest.raises(CheckpointError, match="is damaged"):
        imported(file)
    for before, number, sentence in ((KINDS, 249, "an unknown type.; fetch"), (b"GGUF", 99, "99; use a file of")):
        put(file, before, 0, struct.pack("<I", number))
        with pytest.raises(CheckpointError, match=sentence):
            imported(file)


def test_rotation_of_a_part_and_damage_are_refused(
    imported, file: Path, weights: Weights, tmp_path, monkeypatch
) -> None:
    rotated = write_gguf(tmp_path / "rotated.gguf", weights, metadata={**letters_metadata(), "rope_dimension_count": 6})
    with pytest.raises(CheckpointError, match="6 of a head's 12 numbers are rotated; only models that"):
        imported(rotated)
    for before, skipped, number, sentence in (
        (b"blk.0.attn_q.weight", 20, 99, "a tensor of kind 99, which .* does not know; use a file in Q4, "),
        (b"GGUF", 0, 3 << 24, "has numbers that are not little-endian; use"),
    ):
        put(rotated, before, skipped, struct.pack("<I", number))
        with pytest.raises(CheckpointError, match=sentence):
            imported(rotated)
    lacking = {name: tensor for name, tensor in weights.items() if "embed" not in name}
    with pytest.raises(CheckpointError, match=r"tensor token_embd.weight, which is missing"):
        imported(write_gguf(tmp_path / "lacking.gguf", lacking))
    (file.parent / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged"):
        imported(file)
    monkeypatch.setattr("stages.importing.gguf_file.open_gguf", Mock(side_effect=OSError(12, "Cannot allocate memory")))
    with pytest.raises(CheckpointError, match=r"^cannot read .*Cannot allocate memory"):
        imported(file)
