"""The release store (`--releases`): the directory where a process keeps the releases deployed to it.

current.json                     names of the releases in use, the newest last
0f3a.../signatures.json          signatures of a release, if any
0f3a.../chain/manifest.json      a release: a bundle with the files that this process needs
.coming-9be1.../                 a release that is still arriving
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from stages.checkpoint.bundle import FRONTIER_NAME, Bundle, find_bundle
from stages.checkpoint.files import file_digest, replace_file, sync
from stages.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Part, read_json, read_manifest
from stages.errors import CheckpointError, InputError, ServiceError, StalePart, file_errors, quoted, regular
from stages.wire.secret_files import exclusive

log = logging.getLogger(__name__)

FOLDERS = tuple(field.name for field in fields(Bundle))
# Kinds of models that a folder may contain; all other folders contain `ar`.
KINDS_IN = {"chain": ("chain",), "steps": ("steps",), "local": ("ar", "steps")}
NAME_DIGITS = 16
CURRENT_NAME = "current.json"
LOCK_NAME = "lock"
SIGNATURES_NAME = "signatures.json"  # of a signed bundle: pairs of a public key and its signature, hex
MAX_SIGNATURES = 16
INCOMING_PREFIX = ".coming-"
MAX_STORED = 4  # releases; one more removes those not in use
SPARE_BYTES = 64 << 20  # bytes to keep free on the disk
MAX_COMPANION_BYTES = 64 << 20  # for a file whose size is in no manifest, such as a tokenizer
WRITABLE_BY_OTHERS = 0o022  # a user who can write to the store chooses the weights that run

# True for a folder's part that a machine needs; COMPANIONS means a token model's files next to its parts.
Wants = Callable[[str, int], bool]
COMPANIONS = -1


@dataclass(frozen=True)
class ReleaseManifest:
    """A release: its manifests, which name the files of weights, and the router's files next to them."""

    manifests: Mapping[str, bytes]  # by folder of FOLDERS
    frontier: bytes = b""
    # Public keys and their Ed25519 signatures of `signed`; not part of the release's name.
    signatures: tuple[tuple[bytes, bytes], ...] = field(default=(), compare=False)
    directories: Mapping[str, Path] = field(default_factory=dict, compare=False)  # the folders on this machine
    root: Path | None = field(default=None, compare=False)  # the bundle or single checkpoint on this machine

    @property
    def name(self) -> str:
        return self.digest[:NAME_DIGITS]

    @property
    def signed(self) -> bytes:
        """The bytes that are signed: they cannot be mistaken for anything else that a key may sign."""
        return f"onesweep release {self.digest}".encode()

    @property
    def digest(self) -> str:
        """SHA-256 of all manifests, so that any difference makes another release."""
        # over all bytes, not only the weights: a corrected probe or another frontier makes another release
        digest = hashlib.sha256()
        for folder in sorted(self.manifests):
            digest.update(f"{folder} {hashlib.sha256(self.manifests[folder]).hexdigest()}\n".encode())
        if self.frontier:
            digest.update(f"{FRONTIER_NAME} {hashlib.sha256(self.frontier).hexdigest()}\n".encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Raise CheckpointError unless this is a valid release."""
        if not self.manifests:
            raise CheckpointError("the release has no manifest")
        for folder in self.manifests:
            if folder not in FOLDERS:
                raise CheckpointError(f"{quoted(folder)} is not a folder of a bundle; choose from {', '.join(FOLDERS)}")
        largest = max(map(len, (*self.manifests.values(), self.frontier)))
        if largest > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"a manifest or frontier has {largest} bytes; the limit is {MAX_MANIFEST_BYTES}")

    def write(self, directory: Path) -> None:
        """Write the small files into `directory`."""
        for folder, content in self.manifests.items():
            (directory / folder).mkdir(parents=True, exist_ok=True)
            (directory / folder / MANIFEST_NAME).write_bytes(content)
        if self.frontier:
            (directory / FRONTIER_NAME).write_bytes(self.frontier)
        if self.signatures:
            write_signatures(directory, self.signatures)


def read_release_manifest(checkpoint: Path) -> ReleaseManifest:
    """The release in a bundle, or in a single checkpoint. Raises CheckpointError."""
    directories, frontier = find_bundle(checkpoint).models, checkpoint / FRONTIER_NAME
    with file_errors(CheckpointError):
        manifests = {folder: (path / MANIFEST_NAME).read_bytes() for folder, path in directories.items()}
        content = regular(frontier).read_bytes() if frontier.exists() else b""
        return ReleaseManifest(manifests, content, _read_signatures(checkpoint), directories, checkpoint)


def write_signatures(directory: Path, signatures: Sequence[tuple[bytes, bytes]]) -> None:
    """Write the signatures' file. Raises OSError."""
    record = json.dumps({"signatures": [[each.hex() for each in pair] for pair in signatures]}) + "\n"
    (directory / SIGNATURES_NAME).write_text(record, encoding="utf-8")


def _read_signatures(directory: Path) -> tuple[tuple[bytes, bytes], ...]:
    path = directory / SIGNATURES_NAME
    if not path.exists():
        return ()
    try:
        found = [(bytes.fromhex(key), bytes.fromhex(made)) for key, made in read_json(path)["signatures"]]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} holds no signatures: remove it, and sign the release again") from None
    return tuple(found[:MAX_SIGNATURES])


def release_files(directories: Mapping[str, Path], wants: Wants) -> dict[str, Part]:
    """The files that manifests name, by their path in a bundle. Files next to the weights have unknown size: 0.

    :param directories: by folder. Raises CheckpointError for a part that has no weights yet.
    """
    files: dict[str, Part] = {}
    for folder, directory in directories.items():
        manifest = read_manifest(directory)
        if manifest.kind not in KINDS_IN.get(folder, ("ar",)):
            raise CheckpointError(f"{folder}/ holds a model of kind {manifest.kind!r}, which does not belong there")
        for index, part in enumerate(manifest.parts):
            if part is None:
                raise CheckpointError(f"{folder}/: part {index} has no weights yet")
            if wants(folder, index):
                files[f"{folder}/{part.file}"] = part
        if wants(folder, COMPANIONS):
            files |= {f"{folder}/{name}": Part(name, digest, 0, {}) for name, digest in manifest.files.items()}
    return files


def _signature_check(signers: Path | None) -> Callable[[ReleaseManifest], object]:
    """A check that a key in this file signed a release; the file is reread each time. None: no check.

    Raises InputError for a file without such keys, ModuleNotFoundError without their library.
    """
    if signers is None:
        return lambda contents: None
    from stages.wire.certificates import is_signed, read_signers  # needs cryptography, which few stores do

    read_signers(signers)

    def check(contents: ReleaseManifest) -> None:
        if not is_signed(contents.signed, contents.signatures, read_signers(signers)):
            trouble = "is not signed by a trusted key" if contents.signatures else "is not signed"
            raise CheckpointError(
                f"release {contents.name} {trouble} (signers {signers}): onesweep sign DIR --key FILE"
            )

    return check


class ReleaseStore:
    """The releases of one process on disk. Its methods block."""

    def __init__(self, directory: Path, signers: Path | None = None) -> None:
        """Raises InputError if the directory is unusable or writable by others, OnesweepError if it cannot be locked.

        :param signers: public keys, one of which must have signed a release. Raises InputError: `_signature_check`."""
        self.directory, self._check_signature = directory, _signature_check(signers)
        # Writes the beginning of a part's file, from its manifest's folder and this machine's own copy of the model.
        self.own_copy: Callable[[Path, int, Path], object] | None = None
        self._own = set[str]()  # digests of parts begun that way: only once, as the copy may be of another model
        self._lock = contextlib.ExitStack()
        with file_errors(InputError, f"cannot use --releases {directory}", "name another one"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
            if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
                raise InputError(
                    f"the release store {directory} must belong to you, and nobody else may write to it: "
                    "chmod 700, or give another --releases"
                )
            taken = ServiceError(f"another process is using the release store {directory}: give each its own")
            self._lock.enter_context(exclusive(directory / LOCK_NAME, taken))

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def path(self, name: str) -> Path | None:
        """The directory of a release; None if it is not stored."""
        path = self.directory / name
        return path if _is_name(name) and path.is_dir() else None

    @property
    def in_use(self) -> list[str]:
        """Names of the releases in use; empty if the record cannot be read."""
        try:
            names = json.loads((self.directory / CURRENT_NAME).read_text(encoding="utf-8"))["releases"]
            return [name for name in names if _is_name(name)]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def use(self, names: Sequence[str]) -> None:
        """Record the releases in use, the newest last. Raises CheckpointError if the record cannot be written."""
        record = json.dumps({"releases": list(names)}) + "\n"
        replace_file(self.directory / CURRENT_NAME, lambda path: path.write_text(record, encoding="utf-8"))

    def remove_others(self, keep: Collection[str]) -> None:
        """Remove all other releases; disk errors are ignored."""
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                if _is_name(path.name) and path.name not in keep:
                    shutil.rmtree(path, ignore_errors=True)

    def begin(self, contents: ReleaseManifest, wants: Wants) -> IncomingRelease:
        """Begin to store a release. Files in any stored release are linked instead of sent again.

        Raises CheckpointError for a bad release, ServiceError if there is no room.
        """
        contents.check()
        self._check_signature(contents)
        incoming = self.directory / (INCOMING_PREFIX + contents.name)
        with _writing(incoming):
            if sum(_is_name(path.name) for path in self.directory.iterdir()) > MAX_STORED:
                self.remove_others([*self.in_use, contents.name])
            for other in self.directory.glob(INCOMING_PREFIX + "*"):
                if other != incoming:
                    shutil.rmtree(other)
            contents.write(incoming)
            try:
                files = release_files({folder: incoming / folder for folder in contents.manifests}, wants)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(f"{incoming}/", "")) from None
            missing = {path: part for path, part in files.items() if not self._has_file(incoming, path, part)}
            self._write_own(incoming, missing)
            missing = {path: part for path, part in missing.items() if not _is_part(incoming / path, part)}
            received = {path: _received(incoming / path, part) for path, part in missing.items()}
            need = sum(part.bytes - received[path] for path, part in missing.items())
            free = shutil.disk_usage(incoming).free
        if need + SPARE_BYTES > free:
            message = f"{need} bytes needed, {free} free, and {SPARE_BYTES} must stay free"
            raise ServiceError(f"no space left in {self.directory}: {message}; free some space")
        return IncomingRelease(incoming, self.directory / contents.name, missing, received, self._own)

    def _write_own(self, incoming: Path, missing: Mapping[str, Part]) -> None:
        for path, part in missing.items():
            numbered = re.search(r"-([0-9]+)-[0-9a-f]+\.safetensors$", path)
            if self.own_copy and numbered and part.sha256 not in self._own and not (incoming / path).exists():
                self._own.add(part.sha256)
                try:
                    self.own_copy((incoming / path).parent, int(numbered[1]), incoming / path)
                    log.info("%s: %d of %d bytes from local copy", path, (incoming / path).stat().st_size, part.bytes)
                except Exception as error:  # from a file of unknown origin: the part is then sent
                    log.warning("%s: cannot use the local copy: %s", path, error)

    def _has_file(self, incoming: Path, path: str, part: Part) -> bool:
        """True if a file is in place, or another release has it."""
        goal = incoming / path
        if _is_part(goal, part):
            return True
        for release in self.directory.iterdir():
            other = release / path
            if release != incoming and other.is_file() and _is_part(other, part):
                goal.unlink(missing_ok=True)
                os.link(other, goal)
                return True
        return False


class IncomingRelease:
    """A release that is being stored. Its methods block."""

    def __init__(
        self, incoming: Path, place: Path, missing: dict[str, Part], received: Mapping[str, int], own: Collection[str]
    ) -> None:
        """:param missing: missing files by their path in the release; no other file is written.
        :param received: bytes of each from an earlier transfer, or from this machine's own copy.
        :param own: digests of parts begun by the copy.
        """
        # the receiver makes this list from the manifests, so the sender cannot choose a path here
        self.incoming, self.place, self.missing = incoming, place, missing
        self._left, self._received, self._own = dict(missing), received, own
        self._path, self._start, self._written = "", 0, 0  # path and bytes of the file being written

    @property
    def requests(self) -> list[str]:
        """Requests for the missing files: `path@bytes` means the rest of a file after that many bytes."""
        return [f"{path}@{received}" if (received := self._received[path]) else path for path in self.missing]

    def write(self, request: str, data: bytes) -> None:
        """Append to a file. Raises CheckpointError if the file is not wanted, or has other contents."""
        path, _, received = request.partition("@")
        part = self._left.get(path)
        if part is None or received not in ("", str(self._received[path])):
            raise CheckpointError(f"{request[:80]!r} was not requested")
        if self._written and path != self._path:
            self._end_file()
        self._path, target = path, self.incoming / path
        if not self._written:
            self._start = self._written = int(received or 0)
        mode = "ab" if self._written else "wb"
        self._written += len(data)
        if self._written > (part.bytes or MAX_COMPANION_BYTES):
            most = f"the {part.bytes} bytes in its manifest" if part.bytes else f"{MAX_COMPANION_BYTES} bytes"
            raise CheckpointError(f"{path} has more than {most}")
        with _writing(target):
            if shutil.disk_usage(self.incoming).free < SPARE_BYTES:  # files next to the weights have unknown sizes
                raise ServiceError(f"no space left in {self.incoming.parent}: free some space")
            with target.open(mode) as file:
                file.write(data)
                if self._written == part.bytes:
                    file.flush()
                    os.fsync(file.fileno())
        if self._written == part.bytes:
            self._end_file()

    def finish(self) -> None:
        """Move the release into place. Raises CheckpointError while a file is missing."""
        if self._written:
            self._end_file()
        if self._left:
            raise self._truncated()
        with _writing(self.place):
            for path in [*self.incoming.rglob("*"), self.incoming]:
                sync(path)
            if self.place.exists():  # the same release, perhaps with a damaged file
                shutil.rmtree(self.place)
            self.incoming.rename(self.place)
            sync(self.place.parent)

    def _end_file(self) -> None:
        """Check the file that ended. Raises CheckpointError."""
        part, target = self._left[self._path], self.incoming / self._path
        if part.bytes and self._written < part.bytes:
            raise self._truncated()
        if file_digest(target) != part.sha256:
            if self._start and part.sha256 in self._own:
                log.warning("%s: the local copy is not of the model that is served; fetching the file", self._path)
            target.unlink()
            if self._start:
                raise StalePart(f"{self._path} was resumed from a damaged partial copy: deploy again")
            raise CheckpointError(f"{self._path} does not match its manifest's SHA-256: it is damaged")
        del self._left[self._path]
        self._written = 0

    def _truncated(self) -> CheckpointError:
        path = self._path if self._written else next(iter(self._left))
        return CheckpointError(f"{path} ended after {self._written} of {self._left[path].bytes} bytes")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(rf"[0-9a-f]{{{NAME_DIGITS}}}", name) is not None


def has_size(path: Path, part: Part) -> bool:
    """True if a file has the size of `part`, if that is known."""
    return path.is_file() and part.bytes in (0, path.stat().st_size)


def _received(path: Path, part: Part) -> int:
    """Bytes already received of an incomplete part."""
    size = path.stat().st_size if path.is_file() else 0
    return size if size < part.bytes else 0


def _is_part(path: Path, part: Part) -> bool:
    return has_size(path, part) and file_digest(path) == part.sha256


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    return file_errors(ServiceError, f"cannot write {path}", "check that disk and deploy again")
