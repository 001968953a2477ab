"""Prompts from held-out text, each with its human continuation."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onesweep.stages.errors import InputError
from onesweep.stages.model.randomness import Purpose, uniforms
from onesweep.trainer.blocks.data import read_utf8

VALID = "valid.txt"  # held-out text, where training text lies beside it


@dataclass(frozen=True)
class Document:
    """One file."""

    path: Path
    raw: bytes


def held_out_documents(path: Path) -> list[Document]:
    """A file, or a folder's `valid.txt` files, else its .txt files, else all of its files.

    Raises InputError for a path without text, and for text that is not UTF-8.
    """
    documents = [Document(file, read_utf8(file)) for file in _held_out_files(path)]
    if not any(document.raw.strip() for document in documents):
        raise InputError(f"{path} is empty: --prompts needs text to cut prompts from")
    return documents


def _held_out_files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"no text at {path}: --prompts takes a file or a folder of UTF-8 text")
    if path.is_file():
        return [path]
    every = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not every:
        raise InputError(f"no file under {path}: --prompts takes a file or a folder of UTF-8 text")
    return [file for file in every if file.name == VALID] or [f for f in every if f.suffix == ".txt"] or every


@dataclass(frozen=True)
class Passage:
    """A piece of human text: a prompt and its true continuation, both cut between characters."""

    prompt: bytes
    continuation: bytes


def digest(passages: Sequence[Passage]) -> str:
    """SHA-256 of passages, each part with its length."""
    whole = hashlib.sha256()
    for passage in passages:
        for part in (passage.prompt, passage.continuation):
            whole.update(len(part).to_bytes(4, "big") + part)
    return whole.hexdigest()


def cut_prompts(
    documents: Sequence[Document], count: int, prompt_bytes: int, output_bytes: int, seed: int = 0
) -> tuple[Passage, ...]:
    """`count` passages evenly over the text; no two overlap, none runs over the end of a file.

    The seed shifts them. Raises InputError for too little text.
    """
    window = prompt_bytes + output_bytes
    slots = [
        (document.raw, start)
        for number, document in enumerate(documents)
        for start in _starts(len(document.raw), window, seed, number)
    ]
    if len(slots) < count:
        raise InputError(
            f"the text has room for {len(slots)} prompts of {window} bytes with what follows them, not for {count}: "
            "give more text, or a smaller --count or --bytes"
        )
    chosen = np.linspace(0, len(slots), count, endpoint=False).astype(int)
    cuts = [slots[i] for i in chosen.tolist()]
    return tuple(_passage(raw, start, prompt_bytes, output_bytes) for raw, start in cuts)


def _starts(size: int, window: int, seed: int, document: int) -> range:
    """Starts of neighbouring windows, shifted by what remains of the file."""
    slots = max(size, 0) // window
    spare = max(size, 0) - slots * window
    shift = min(int(uniforms(seed, Purpose.WINDOWS, 0, 1, 1, document)[0, 0] * (spare + 1)), spare)
    return range(shift, shift + slots * window, window)


def _passage(raw: bytes, start: int, prompt_bytes: int, output_bytes: int) -> Passage:
    begin = _forward(raw, start)
    border = max(_back(raw, start + prompt_bytes), begin)
    end = max(_back(raw, start + prompt_bytes + output_bytes), border)
    return Passage(raw[begin:border], raw[border:end])


def _forward(raw: bytes, at: int) -> int:
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _back(raw: bytes, at: int) -> int:
    while 0 < at < len(raw) and raw[at] & 0xC0 == 0x80:
        at -= 1
    return at
