"""Text from files: what is held out for prompts, and what the models were trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.errors import InputError

TRAIN, VALID = "train.txt", "valid.txt"


@dataclass(frozen=True)
class Document:
    """One file."""

    path: Path
    raw: bytes


def held_out_documents(path: Path) -> list[Document]:
    """A file, or a folder's `valid.txt` files, else its .txt files, else all of its files.

    Raises InputError for a path without text, and for text that is not UTF-8.
    """
    documents = [_read(file) for file in _held_out_files(path)]
    if not any(document.raw.strip() for document in documents):
        raise InputError(f"{path} is empty: --prompts needs text to cut prompts from")
    return documents


def training_documents(prompts: Path, train: Path | None) -> list[Document]:
    """The text that the models were trained on: `train`, else the `train.txt` files beside the prompts, else none."""
    if train is not None:
        files = _files(train, "--train")
        chosen = [file for file in files if file.name == TRAIN] or files
    elif prompts.is_file():
        beside = prompts.with_name(TRAIN)
        chosen = [beside] if prompts.name == VALID and beside.is_file() else []
    else:
        chosen = [file for file in _files(prompts, "--prompts") if file.name == TRAIN]
        if not any(file.name == VALID for file in _files(prompts, "--prompts")):
            chosen = []
    return [_read(file) for file in chosen]


def _held_out_files(path: Path) -> list[Path]:
    files = _files(path, "--prompts")
    return [file for file in files if file.name == VALID] or files


def _files(path: Path, flag: str) -> list[Path]:
    if not path.exists():
        raise InputError(f"no text at {path}: {flag} takes a file or a folder of UTF-8 text")
    if path.is_file():
        return [path]
    every = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    files = [file for file in every if file.suffix == ".txt"] or every
    if not files:
        raise InputError(f"no file under {path}: {flag} takes a file or a folder of UTF-8 text")
    return files


def _read(path: Path) -> Document:
    try:
        raw = path.read_bytes()
        raw.decode()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}): convert it, or leave it out") from None
    return Document(path, raw)
