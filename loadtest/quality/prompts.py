"""Prompts from held-out text, each with its human continuation, and the training text of the models."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onesweep.stages.errors import InputError
from onesweep.stages.model.randomness import Purpose, uniforms
from onesweep.trainer.blocks.data import read_utf8

TRAIN, VALID = "train.txt", "valid.txt"  # the names under which training text and held-out text stand side by side


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
    return [Document(file, read_utf8(file)) for file in chosen]


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


@dataclass(frozen=True)
class Passage:
    """A piece of human text: a prompt, its true continuation, and what follows that. All cut between characters."""

    prompt: bytes
    continuation: bytes
    suffix: bytes = b""


@dataclass(frozen=True)
class PromptSet:
    """Passages to be continued, and others, from between them, that stand for human text as such."""

    asked: tuple[Passage, ...]
    reference: tuple[Passage, ...]
    rest: bytes  # the text that is in no passage, for a judge where no training text is given

    def digest(self) -> str:
        """SHA-256 of the passages asked for, each with its length."""
        whole = hashlib.sha256()
        for passage in self.asked:
            for part in (passage.prompt, passage.continuation, passage.suffix):
                whole.update(len(part).to_bytes(4, "big") + part)
        return whole.hexdigest()


def cut_prompts(
    documents: Sequence[Document],
    count: int,
    prompt_bytes: int,
    output_bytes: int,
    seed: int = 0,
    suffix_bytes: int = 0,
) -> PromptSet:
    """`count` passages evenly over the text, and as many others as there is room for, up to `count`.

    No two overlap (a suffix may reach into the next), none runs over the end of a file. The seed shifts them.
    Raises InputError for too little text.
    """
    window = prompt_bytes + output_bytes
    slots = [
        (document.raw, start)
        for number, document in enumerate(documents)
        for start in _starts(len(document.raw) - suffix_bytes, window, seed, number)
    ]
    if len(slots) < count:
        raise InputError(
            f"the text has room for {len(slots)} prompts of {window} bytes with what follows them, not for {count}: "
            "give more text, or a smaller --count or --bytes"
        )
    chosen = np.linspace(0, len(slots), min(2 * count, len(slots)), endpoint=False).astype(int)
    asked = set(chosen[np.linspace(0, len(chosen), count, endpoint=False).astype(int)].tolist())
    others = [i for i in chosen.tolist() if i not in asked]

    def passage(slot: int) -> Passage:
        raw, start = slots[slot]
        return _passage(raw, start, (prompt_bytes, output_bytes, suffix_bytes))

    untouched = sorted(set(range(len(slots))) - asked - set(others))
    return PromptSet(
        tuple(map(passage, sorted(asked))),
        tuple(map(passage, others)),
        b"\n".join(slots[i][0][slots[i][1] : slots[i][1] + window] for i in untouched),
    )


def _starts(size: int, window: int, seed: int, document: int) -> range:
    """Starts of neighbouring windows, shifted by what remains of the file."""
    slots = max(size, 0) // window
    spare = max(size, 0) - slots * window
    shift = min(int(uniforms(seed, Purpose.WINDOWS, 0, 1, 1, document)[0, 0] * (spare + 1)), spare)
    return range(shift, shift + slots * window, window)


def _passage(raw: bytes, start: int, sizes: tuple[int, int, int]) -> Passage:
    begin, edges = _forward(raw, start), []
    for size in sizes:
        start += size
        edges.append(max(_back(raw, start), begin))
    first, second, third = edges
    return Passage(raw[begin:first], raw[first:second], raw[second:third])


def _forward(raw: bytes, at: int) -> int:
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _back(raw: bytes, at: int) -> int:
    while 0 < at < len(raw) and raw[at] & 0xC0 == 0x80:
        at -= 1
    return at
