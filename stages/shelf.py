"""A shelf: the directory where a process keeps the releases that were deployed to it.

current.json                     names of those in use, the newest last
0f3a.../chain/manifest.json      a whole release, as a bundle; of its files those that this process needs
.coming-9be1.../                 one that is being stored
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from stages.checkpoint import file_digest, replace_file
from stages.contents import NAME_DIGITS, Contents, Wants
from stages.errors import CheckpointError, ServiceError
from stages.manifest import Part

CURRENT_NAME = "current.json"
LOCK_NAME = "lock"
COMING = ".coming-"
MOST_STORED = 4
"""Releases; when another comes, those that are not in use make room for it."""
SPARE_BYTES = 64 << 20
"""Left free on the disk."""
MOST_BESIDE_BYTES = 64 << 20
"""Of a file whose size a manifest does not tell: a tokenizer."""
OTHERS_WRITE = 0o022
"""Who writes there says which weights are run."""


class Shelf:
    """One process's releases on disk. Its methods block."""

    def __init__(self, directory: Path) -> None:
        """Raises ServiceError when the directory cannot be used, or another process uses it, or others may write."""
        self.directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
            if status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
                raise ServiceError(
                    f"the shelf {directory} must be a directory of yours that nobody else can write to: "
                    "chmod 700, or name another --shelf"
                )
            self._lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ServiceError(f"the shelf {directory} is another process's: give each host its own --shelf") from None
        except OSError as error:
            raise ServiceError(f"cannot use the shelf {directory}: {error.strerror}; name another --shelf") from None

    def close(self) -> None:
        """Leave the shelf to others."""
        os.close(self._lock)

    def path(self, name: str) -> Path | None:
        """Where a release is, if it is here."""
        path = self.directory / name
        return path if _is_name(name) and path.is_dir() else None

    @property
    def in_use(self) -> list[str]:
        """Names as `use` left them; none where that cannot be read."""
        try:
            names = json.loads((self.directory / CURRENT_NAME).read_text(encoding="utf-8"))["releases"]
            return [name for name in names if _is_name(name)]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def use(self, names: Sequence[str]) -> None:
        """Remember what is in use, the newest last. Raises CheckpointError when that cannot be written."""
        record = json.dumps({"releases": list(names)}) + "\n"
        replace_file(self.directory / CURRENT_NAME, lambda path: path.write_text(record, encoding="utf-8"))

    def remove_others(self, keep: Collection[str]) -> None:
        """Remove every release that is not to be kept, as far as the disk lets us."""
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                if _is_name(path.name) and path.name not in keep:
                    shutil.rmtree(path, ignore_errors=True)

    def begin(self, contents: Contents, wants: Wants) -> Intake:
        """Start to store a release; what is here already, in whatever release, is not wanted again.

        Raises CheckpointError where it cannot be one, ServiceError where there is no room.
        """
        contents.check()
        coming = self.directory / (COMING + contents.name)
        try:
            if sum(_is_name(path.name) for path in self.directory.iterdir()) > MOST_STORED:
                self.remove_others([*self.in_use, contents.name])
            for other in self.directory.glob(COMING + "*"):
                if other != coming:
                    shutil.rmtree(other)
            contents.write(coming)
            try:
                files = contents.files({folder: coming / folder for folder in contents.manifests}, wants)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(f"{coming}/", "")) from None
            wanted = {path: part for path, part in files.items() if not self._have(coming, path, part)}
            need, free = sum(part.bytes for part in wanted.values()), shutil.disk_usage(coming).free
        except OSError as error:
            raise _trouble(coming, error) from None
        if need + SPARE_BYTES > free:
            raise ServiceError(f"no room on {self.directory}: {need} bytes needed, {free} free; free some space")
        return Intake(coming, self.directory / contents.name, wanted)

    def _have(self, coming: Path, path: str, part: Part) -> bool:
        """Whether a file is in its place, or could be put there from another release."""
        goal = coming / path
        if _is_part(goal, part):
            return True
        for release in self.directory.iterdir():
            other = release / path
            if release != coming and other.is_file() and _is_part(other, part):
                goal.unlink(missing_ok=True)
                os.link(other, goal)
                return True
        return False


class Intake:
    """A release on its way onto a shelf. Its methods block."""

    def __init__(self, coming: Path, place: Path, wanted: dict[str, Part]) -> None:
        """:param wanted: files to come, by their path in the release; nothing else is ever written."""
        self.coming, self.place, self.wanted = coming, place, wanted
        self._left = dict(wanted)
        self._path, self._written = "", 0

    def write(self, path: str, data: bytes) -> None:
        """Add to a file. Raises CheckpointError for one that is not wanted, or turns out to be another."""
        part = self._left.get(path)
        if part is None:
            raise CheckpointError(f"{path[:80]!r} was not asked for")
        if self._written and path != self._path:
            self._end_file()
        self._path, target = path, self.coming / path
        self._written += len(data)
        if self._written > (part.bytes or MOST_BESIDE_BYTES):
            most = f"the {part.bytes} bytes that its manifest says" if part.bytes else f"{MOST_BESIDE_BYTES} bytes"
            raise CheckpointError(f"{path} has more than {most}")
        try:
            with target.open("wb" if self._written == len(data) else "ab") as file:
                file.write(data)
                if self._written == part.bytes:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise _trouble(target, error) from None
        if self._written == part.bytes:
            self._end_file()

    def finish(self) -> None:
        """Put the release in its place. Raises CheckpointError while a file is missing."""
        if self._written:
            self._end_file()
        if self._left:
            raise self._short()
        try:
            for path in [*self.coming.rglob("*"), self.coming]:
                _sync(path)
            if self.place.exists():  # the same release, with a damaged file maybe
                shutil.rmtree(self.place)
            self.coming.rename(self.place)
            _sync(self.place.parent)
        except OSError as error:
            raise _trouble(self.place, error) from None

    def _end_file(self) -> None:
        """Take the file that was being written for whole. Raises CheckpointError where it is not."""
        part, target = self._left[self._path], self.coming / self._path
        if part.bytes and self._written < part.bytes:
            raise self._short()
        if file_digest(target) != part.sha256:
            target.unlink()
            raise CheckpointError(f"{self._path} does not have its manifest's SHA-256: it is damaged")
        del self._left[self._path]
        self._written = 0

    def _short(self) -> CheckpointError:
        path = self._path if self._written else next(iter(self._left))
        return CheckpointError(f"{path} ended after {self._written} of {self._left[path].bytes} bytes")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(rf"[0-9a-f]{{{NAME_DIGITS}}}", name) is not None


def has_size(path: Path, part: Part) -> bool:
    """Whether there is a file of the size of `part`, where that is known."""
    return path.is_file() and part.bytes in (0, path.stat().st_size)


def _is_part(path: Path, part: Part) -> bool:
    return has_size(path, part) and file_digest(path) == part.sha256


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _trouble(path: Path, error: OSError) -> ServiceError:
    return ServiceError(f"cannot write {path}: {error.strerror}; see to that disk and deploy again")
