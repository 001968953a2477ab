"""Tokens of training text: byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909), by the package `tokenizers`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from stages.errors import CheckpointError, DataError, InputError
from stages.importing.source import open_tokenizer
from stages.model.randomness import Purpose, uniforms

PIECE_BYTES = 1 << 20
MOST_CUT = 512
MAX_TOKENIZER_BYTES = 64 << 20
# A byte-level vocabulary has every byte; with more tokens than this the head would outweigh what is trained here.
LEAST_VOCABULARY, MOST_VOCABULARY = 257, 1 << 16
# What byte-level BPE writes for each byte (GPT-2): printable ones for themselves, the rest from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer.json: text in tokens, and how many bytes each token stands for."""

    json: str

    @classmethod
    def read(cls, path: Path) -> TextTokenizer:
        """Raises DataError for a file that is none, InputError without the package."""
        try:
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                raise DataError(f"{path} has more than {MAX_TOKENIZER_BYTES >> 20} MB: that is no tokenizer.json")
            made = cls(path.read_text(encoding="utf-8"))
            if not made.vocabulary:
                raise ValueError("it has no tokens")
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, CheckpointError) as error:
            raise DataError(
                f"{path} is no tokenizer.json ({error}): make one with `onesweep train tokenizer`"
            ) from None
        return made

    @cached_property
    def encoding(self) -> Any:  # noqa: ANN401
        return open_tokenizer(self.json)

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> int:
        return max(self.encoding.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: Tensor, cut: bool = False) -> Tensor:
        """Bytes (bytes,) uint8 in tokens: (tokens,) int32.

        :param cut: where prompts may end, too: in pieces of 1 to MOST_CUT characters, each in tokens of its own.
        """
        # A prompt may end within a word, where its tokens differ from those of the whole text. A model that was not
        # trained on such ends continues them badly.
        found = list[Tensor]()
        for number, piece in enumerate(_pieces(text)):
            encoded = self.encoding.encode_batch(_cut(piece, number) if cut else [piece], add_special_tokens=False)
            found += (torch.tensor(each.ids, dtype=torch.int32) for each in encoded)
        return torch.cat(found)


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


def _cut(text: str, number: int) -> list[str]:
    """`text` in pieces of random lengths, the same ones every time."""
    lengths = 1 + (uniforms(number, Purpose.WINDOWS, 0, 1, 2 * len(text) // MOST_CUT + 64)[0] * MOST_CUT).astype(int)
    ends = lengths.cumsum()
    cuts = [0, *(end for end in ends.tolist() if end < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def token_bytes(tokenizer: TextTokenizer) -> Tensor:
    """Bytes that each token of a byte-level vocabulary stands for: (vocabulary,) int64.

    Raises DataError for another kind of tokenizer, whose tokens do not stand for so many bytes each.
    """
    known = {chr(code) for code in _PRINTABLE} | {chr(256 + i) for i in range(256 - len(_PRINTABLE))}
    lengths = torch.zeros(tokenizer.vocabulary, dtype=torch.int64)
    for token, number in tokenizer.encoding.get_vocab(with_added_tokens=False).items():
        if not known.issuperset(token):
            raise DataError(f"the tokenizer is not byte-level (token {token!r}): bits a byte cannot be told of it")
        lengths[number] = len(token)
    return lengths


def train_tokenizer(text: Tensor, vocabulary: int) -> TextTokenizer:
    """Byte-level BPE of so many tokens, without special ones. text: (bytes,) uint8. Raises InputError."""
    if not LEAST_VOCABULARY <= vocabulary <= MOST_VOCABULARY:
        raise InputError(f"--vocabulary must be from {LEAST_VOCABULARY} to {MOST_VOCABULARY}, not {vocabulary}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(_pieces(text), trainer)
    found: int = made.get_vocab_size()
    if found < vocabulary:
        raise InputError(f"this text has {found} tokens at most, and --vocabulary is {vocabulary}: give more text")
    return TextTokenizer(made.to_str())
