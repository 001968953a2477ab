"""Files of any checkpoint: written whole or not at all, and identified by their digests."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from stages.checkpoint.manifest import Manifest
from stages.errors import CheckpointError, InputError, file_errors, regular


# A new part is written next to the old one, with its digest in the name, and the manifest is switched atomically:
# a full disk or a crash leaves the previous checkpoint whole (tests/stages/checkpoint/test_saving.py).
def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write `path` through a temporary file next to it. Raises CheckpointError if it cannot be written."""
    with staged_file(path, write) as staged:
        staged.replace(path)


@contextmanager
def staged_file(path: Path, write: Callable[[Path], object]) -> Iterator[Path]:
    """A finished temporary file next to `path`, to be moved into place; removed at the end if it was not."""
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        sync(temporary)
        temporary.chmod(0o644)
        yield temporary
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        remedy = ": free some space" if any(word in f"{cause}" for word in ("space", "quota")) else ""
        raise CheckpointError(f"cannot save {path}: {cause}; the previous file is untouched{remedy}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_new(out: Path) -> None:
    """Raise InputError if `out` already exists, unless it is an empty directory."""
    with file_errors(InputError, f"cannot use {out} as a directory"), suppress(FileNotFoundError):
        if not stat.S_ISDIR(out.lstat().st_mode) or any(out.iterdir()):
            raise InputError(f"{out} already exists: name a new directory")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` at the end, or is removed on failure. Raises CheckpointError."""
    with file_errors(CheckpointError, f"cannot create a directory next to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        with file_errors(CheckpointError, f"cannot save {out}"):
            yield directory
            directory.chmod(0o755)
            if out.exists():
                out.rmdir()
            directory.replace(out)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces. Raises OSError, and CheckpointError unless it is a regular file."""
    with regular(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# Files next to a checkpoint's weights: a pretrained model's tokenizer, its chat template, its licence.
CHAT_TEMPLATE_NAME, TOOL_TEMPLATE_NAME = "chat_template.jinja", "chat_template_tool_use.jinja"
SPECIALS_NAME = "special_tokens.json"
MAX_FILE_BYTES = 64 << 20


def read_companion(directory: Path, manifest: Manifest, name: str) -> bytes:
    """A file that the manifest names. Raises CheckpointError if it is missing, too large, or has another digest."""
    path = directory / name
    with file_errors(CheckpointError, f"cannot read {path}"):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        if file_digest(path) != manifest.files[name]:
            raise CheckpointError(f"{path} does not match its manifest's SHA-256: it is damaged")
        return path.read_bytes()
