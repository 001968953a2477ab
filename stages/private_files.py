"""Files that nobody else may read: keys and tokens. Written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stages.errors import InputError

SECRET, PUBLIC = 0o600, 0o644


def make_private_directory(directory: Path) -> None:
    """Make it, or see that nobody else can enter it. Raises InputError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError as error:
        raise InputError(f"cannot make the directory {directory}: {error.strerror}") from None
    if mode & 0o077:
        raise InputError(f"{directory} holds keys and others can enter it: chmod 700 {directory}")


def write_file(path: Path, raw: bytes, mode: int = SECRET) -> None:
    """Put a new file in the place of the old one; at no moment more people can read it than `mode` says.

    Raises InputError.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(raw)
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
