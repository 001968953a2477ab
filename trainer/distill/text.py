"""A user's text in the symbols of the model that is distilled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stages.errors import CheckpointError, DataError
from stages.manifest import TOKENIZER_NAME, Manifest
from stages.pretrained.tokens import open_tokenizer
from trainer.data import Corpus, load_corpus

PIECE_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 30


def symbols_corpus(paths: Sequence[Path], directory: Path, manifest: Manifest, window: int) -> Corpus:
    """The files' text in the symbols of the checkpoint in `directory`, training and held-out apart.

    Each path as `load_corpus` takes it, each half at least `window` symbols long. The corpus' tensors are (symbols,)
    int32, or uint8 where symbols are bytes. Raises DataError, CheckpointError for a damaged tokenizer.
    """
    found = [load_corpus(path) for path in paths]
    if not found:
        raise DataError("give some text to distil on, in --text")
    name = ", ".join(corpus.name for corpus in found)
    halves = [torch.cat([getattr(corpus, half) for corpus in found]) for half in ("train", "valid")]
    if sum(map(len, halves)) > MAX_TEXT_BYTES:
        raise DataError(f"{name}: more than {MAX_TEXT_BYTES >> 20} MB of text; give less of it")
    return in_symbols(Corpus(name, *halves), directory, manifest, window)


def in_symbols(corpus: Corpus, directory: Path, manifest: Manifest, window: int) -> Corpus:
    """A text of bytes in the symbols of the checkpoint in `directory`; as `symbols_corpus`."""
    name, halves = corpus.name, [corpus.train, corpus.valid]
    if manifest.tokenizer == "tokens":
        halves = [_tokens(half, directory, manifest) for half in halves]
    for what, half in zip(("training", "held-out"), halves, strict=True):
        if len(half) < window:
            raise DataError(
                f"{name}: the {what} text has {len(half)} {manifest.tokenizer}, and one window needs {window}; "
                "give more text, or a smaller window"
            )
    return Corpus(name, *halves)


def _tokens(text: Tensor, directory: Path, manifest: Manifest) -> Tensor:
    path = directory / TOKENIZER_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if hashlib.sha256(raw).hexdigest() != manifest.files[TOKENIZER_NAME]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of the manifest")
    tokenizer = open_tokenizer(raw.decode())
    ids = (tokenizer.encode(piece, add_special_tokens=False).ids for piece in _pieces(text))
    return torch.cat([torch.tensor(piece, dtype=torch.int32) for piece in ids])


def _pieces(text: Tensor) -> Iterator[str]:
    """Text in pieces that end with a line where there are lines: a tokenizer holds many times what it reads."""
    raw = text.numpy().tobytes()
    begin = 0
    while begin < len(raw):
        end = begin + PIECE_BYTES
        if end < len(raw):
            end = raw.rfind(b"\n", begin, end) + 1 or end
        yield raw[begin:end].decode(errors="ignore")
        begin = end
