"""Keys and tokens: files that nobody else may read, written whole or not at all; locks; and the flags that name them.

This module must not import gRPC: help must not wait for such a library."""

import argparse
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.errors import InputError, OnesweepError, ServiceError, file_errors

TOKEN_VARIABLE = "ONESWEEP_TOKEN"
SECRET, PUBLIC = 0o600, 0o644
SECRET_MODE = 0o027  # permissions that a secret's file must not have: its group may read it, others nothing
FileStamp = tuple[int, int, int] | None
GROUP_READS = 0o040  # the one permission that a replaced file keeps beyond its mode: see `check_secret`


def read_file(path: Path) -> bytes:
    """Read a file. Raises InputError."""
    with file_errors(InputError, f"cannot read {path}"):
        return path.read_bytes()


def check_secret(path: Path) -> None:
    """Raise InputError if anyone but the owner can change the file, or anyone outside its group can read it."""
    if path.stat().st_mode & SECRET_MODE:
        raise InputError(f"{path} is a secret, but others can read or change it: chmod 600 {path}")


def stamp_of(path: Path) -> FileStamp:
    """The state of a file, which differs after a change; None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def user_directory(variable: str, fallback: str) -> Path:
    """The folder `onesweep` in $VARIABLE, else in `fallback` of the user's home. Raises InputError without a home."""
    try:
        return Path(os.environ.get(variable) or Path.home() / fallback) / "onesweep"
    except RuntimeError:
        raise InputError(f"this user has no home directory: set HOME, or {variable} to a directory") from None


def state_home() -> Path:
    """The directory of runs and of places in them. Raises InputError without a home."""
    return user_directory("XDG_STATE_HOME", ".local/state")


def state_directory() -> Path:
    """The directory of deployments' tokens, records and logs: $ONESWEEP_STATE, or this machine's in `state_home`.

    Not $TMPDIR's, if there is a home: that differs between sessions, and systems remove old files there. Machines may
    share a home, but neither ports nor process ids. Raises ServiceError if another user can enter it."""
    named = os.environ.get("ONESWEEP_STATE")
    directory = Path(named or f"{os.environ.get('TMPDIR') or '/tmp'}/onesweep-{os.getuid()}")
    with suppress(InputError):  # of a user without a home
        directory = directory if named else state_home() / "up" / socket.gethostname().partition(".")[0]
    check_private(directory)
    return directory


def check_private(directory: Path) -> None:
    """Raise ServiceError unless only this user can use `directory`: its contents are trusted, and signals are sent."""
    try:
        status = directory.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServiceError(
            f"{directory} must belong to you, and nobody else may enter it (chmod 700): "
            "fix that, or name another directory in ONESWEEP_STATE"
        )


def _make_directories(directory: Path) -> None:
    """Make a directory and its missing parents for this user only; `parents=True` would leave theirs to umask."""
    for each in (*reversed(directory.parents), directory):
        each.mkdir(mode=0o700, exist_ok=True)


def make_state_directory(directory: Path) -> None:
    """Make a directory that only this user can use, or check one. Raises ServiceError."""
    with file_errors(ServiceError, f"cannot create {directory}", "name another directory in ONESWEEP_STATE"):
        _make_directories(directory)
    check_private(directory)


def make_private_directory(directory: Path) -> None:
    """Make a directory that only its owner can enter, or check one. Raises InputError."""
    with file_errors(InputError, f"cannot create the directory {directory}"):
        _make_directories(directory)
        mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        raise InputError(f"{directory} holds keys, but others can enter it: chmod 700 {directory}")


def write_file(path: Path, raw: bytes, mode: int = SECRET) -> None:
    """Replace a file atomically; the new file has the old one's owner and group, and at most its mode.

    At every moment, only users whom `mode` allows, and the old group, can read it. Raises InputError.
    """
    part = path.with_name(f".{path.name}.part")
    with file_errors(InputError, f"cannot write {path}"):
        part.unlink(missing_ok=True)
        try:
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(raw)
                if path.exists():
                    _be_like(file.fileno(), path, mode)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Keep other commands from changing the files next to `path` between reading and writing. Raises InputError."""
    with file_errors(InputError, f"cannot write {path}"):
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def exclusive(path: Path, refusal: OnesweepError) -> Iterator[None]:
    """Hold the lock file `path`; the kernel releases it when its holder dies. Raises `refusal` if another process holds
    it, OnesweepError if the file cannot be made: exit code 1, as a service tries again until the disk is mended."""
    with file_errors(OnesweepError, f"cannot write {path}"):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, SECRET)
    with open(handle, "a"):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        yield


def _be_like(handle: int, path: Path, mode: int) -> None:
    before = path.stat()
    try:
        os.fchown(handle, before.st_uid, before.st_gid)
    except PermissionError:
        raise InputError(
            f"cannot write {path}: it belongs to user {before.st_uid} and group {before.st_gid}, "
            "and its readers could not read a file of yours; run this as that user, or as root"
        ) from None
    os.fchmod(handle, before.st_mode & (mode | GROUP_READS))


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """`--tls-cert`, `--tls-key`, `--tls-ca`, `--insecure`."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate to present, from `onesweep certs`")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    add_client_options(parser)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """`--tls-ca`, `--insecure`."""
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority whose certificates are trusted")
    parser.add_argument("--insecure", action="store_true", help="accept plain text to and from other machines")


def add_token_options(parser: argparse.ArgumentParser) -> None:
    """`--token-file`."""
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"file with the token (${TOKEN_VARIABLE})")
