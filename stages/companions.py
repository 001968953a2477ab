"""Files beside a checkpoint's weights: a pretrained model's tokenizer, its chat template, its licence."""

from __future__ import annotations

from pathlib import Path

from stages.checkpoint import file_digest
from stages.errors import CheckpointError
from stages.manifest import Manifest

MAX_FILE_BYTES = 64 << 20


def read_companion(directory: Path, manifest: Manifest, name: str) -> bytes:
    """A file that the manifest names. Raises CheckpointError where it is not there, too large or another one."""
    path = directory / name
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        if file_digest(path) != manifest.files[name]:
            raise CheckpointError(f"{path} does not have its manifest's SHA-256: it is damaged")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
