"""What a release consists of: manifests, which name the files of weights, and what the router has beside them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from stages.bundle import FRONTIER_NAME, NGRAM_NAME, Bundle, find_bundle
from stages.checkpoint import file_digest
from stages.errors import CheckpointError
from stages.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Part, read_manifest

FOLDERS = tuple(field.name for field in fields(Bundle))
NAME_DIGITS = 16

Wants = Callable[[str, int], bool]
"""Whether a machine needs a part of a folder; BESIDE stands for what a token model has beside its parts."""
BESIDE = -1


@dataclass(frozen=True)
class Contents:
    """The small files of a release."""

    manifests: Mapping[str, bytes]
    """By folder: chain, ar, scorer, local."""
    frontier: bytes = b""
    ngrams: Part | None = None
    """The file of the router's drafter of n-grams, if it has one. It stays at the router, as local/ does."""
    directories: Mapping[str, Path] = field(default_factory=dict, compare=False)
    """Where the folders are on this machine."""
    root: Path | None = field(default=None, compare=False)
    """Where the bundle, or single checkpoint, is on this machine."""

    @property
    def name(self) -> str:
        """The release's name: whatever differs in it, a note in a manifest even, makes another one."""
        digest = hashlib.sha256()
        for folder in sorted(self.manifests):
            digest.update(f"{folder} {hashlib.sha256(self.manifests[folder]).hexdigest()}\n".encode())
        if self.frontier:
            digest.update(f"{FRONTIER_NAME} {hashlib.sha256(self.frontier).hexdigest()}\n".encode())
        if self.ngrams:
            digest.update(f"{NGRAM_NAME} {self.ngrams.sha256}\n".encode())
        return digest.hexdigest()[:NAME_DIGITS]

    def check(self) -> None:
        """Raises CheckpointError for what cannot be a release, whoever sent it."""
        if not self.manifests:
            raise CheckpointError("a release without a manifest")
        for folder in self.manifests:
            if folder not in FOLDERS:
                raise CheckpointError(f"{folder[:40]!r} is no folder of a bundle; there are {', '.join(FOLDERS)}")
        largest = max(map(len, (*self.manifests.values(), self.frontier)))
        if largest > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"a manifest or frontier of {largest} bytes; at most {MAX_MANIFEST_BYTES}")
        if self.ngrams and not (re.fullmatch("[0-9a-f]{64}", self.ngrams.sha256) and self.ngrams.bytes):
            raise CheckpointError(f"{NGRAM_NAME} must have a SHA-256 and a size")

    def files(self, directories: Mapping[str, Path], wants: Wants) -> dict[str, Part]:
        """All large files of the release, as `files_of`. Raises CheckpointError."""
        files = files_of(directories, wants)
        if self.ngrams and wants("local", BESIDE):
            files[NGRAM_NAME] = self.ngrams
        return files

    def write(self, directory: Path) -> None:
        """Put the small files where they belong in `directory`."""
        for folder, content in self.manifests.items():
            (directory / folder).mkdir(parents=True, exist_ok=True)
            (directory / folder / MANIFEST_NAME).write_bytes(content)
        if self.frontier:
            (directory / FRONTIER_NAME).write_bytes(self.frontier)


def read_contents(checkpoint: Path) -> Contents:
    """The release in a bundle, or in a single checkpoint. Raises CheckpointError."""
    directories = {name: path for name, path in vars(find_bundle(checkpoint)).items() if path is not None}
    frontier, ngrams = checkpoint / FRONTIER_NAME, checkpoint / NGRAM_NAME
    try:
        manifests = {folder: (path / MANIFEST_NAME).read_bytes() for folder, path in directories.items()}
        return Contents(
            manifests,
            frontier.read_bytes() if frontier.exists() else b"",
            Part(NGRAM_NAME, file_digest(ngrams), ngrams.stat().st_size, {}) if ngrams.exists() else None,
            directories,
            checkpoint,
        )
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None


def files_of(directories: Mapping[str, Path], wants: Wants) -> dict[str, Part]:
    """The files that manifests name, by their path in a bundle. The size of those beside the weights is not known: 0.

    :param directories: by folder. Raises CheckpointError for a part that was not trained yet.
    """
    files: dict[str, Part] = {}
    for folder, directory in directories.items():
        manifest = read_manifest(directory)
        if (manifest.kind == "chain") != (folder == "chain"):
            raise CheckpointError(f"{folder}/ holds a model of kind {manifest.kind!r}, which belongs elsewhere")
        for index, part in enumerate(manifest.parts):
            if part is None:
                raise CheckpointError(f"{folder}/: part {index} is not trained yet")
            if wants(folder, index):
                files[f"{folder}/{part.file}"] = part
        if wants(folder, BESIDE):
            files |= {f"{folder}/{name}": Part(name, digest, 0, {}) for name, digest in manifest.files.items()}
    return files
