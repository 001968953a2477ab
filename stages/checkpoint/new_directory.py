"""A directory that is there as a whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.errors import CheckpointError, InputError


def require_new(out: Path) -> None:
    """Raise InputError where something is at `out` already, other than an empty directory."""
    try:
        is_taken = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
    except OSError as error:
        raise InputError(f"{out} cannot become a directory: {error.strerror}") from None
    if is_taken:
        raise InputError(f"{out} is there already: name a new directory")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` at the end, or is gone. Raises CheckpointError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise CheckpointError(f"cannot make a directory beside {out}: {error.strerror}") from None
    try:
        yield directory
        directory.chmod(0o755)
        if out.exists():
            out.rmdir()
        directory.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot save {out}: {error.strerror}") from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
