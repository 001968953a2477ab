"""Files that nobody else may read: keys and tokens. Written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.errors import InputError

SECRET, PUBLIC = 0o600, 0o644
GROUP_READS = 0o040
"""May be allowed beyond a mode: see `check_secret`."""


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
    """Put a new file in the place of the old one, whose owner and group it gets, and its mode where that is not wider.

    At no moment more people can read it than `mode` says, and the old one's group. Raises InputError.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(raw)
            if path.exists():
                _be_like(file.fileno(), path, mode)
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def lock_beside(path: Path) -> Iterator[None]:
    """Have no other command change the files beside `path` from its reading to its writing. Raises InputError."""
    try:
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _be_like(handle: int, path: Path, mode: int) -> None:
    before = path.stat()
    try:
        os.fchown(handle, before.st_uid, before.st_gid)
    except PermissionError:
        raise InputError(
            f"cannot write {path}: it belongs to user {before.st_uid} and group {before.st_gid}, "
            "and who reads it could not read a file of yours; run this as that user, or as root"
        ) from None
    os.fchmod(handle, before.st_mode & (mode | GROUP_READS))
