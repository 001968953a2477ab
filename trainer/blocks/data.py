"""Training text: any file or folder of UTF-8 text, read as bytes or tokens; and the device of its batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from stages.errors import CheckpointError, DataError, InputError, exists, file_errors, regular
from stages.importing.speech import open_tokenizer
from stages.model.architecture import VOCABULARY
from stages.model.randomness import Purpose, uniforms

VALID_SHARE = 0.05
MIN_BYTES = 4096


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, each (tokens,): bytes in uint8, or a tokenizer's token numbers."""

    name: str
    train: Tensor
    valid: Tensor
    tokenizer: TextTokenizer | None = None  # None if tokens are bytes
    device: str = "cpu"  # of the batches

    def in_tokens(self, tokenizer: TextTokenizer, cut: bool = False) -> Corpus:
        """This text of bytes, converted to a tokenizer's tokens.

        :param cut: for the training text, as in `TextTokenizer.encode`.
        """
        return Corpus(self.name, tokenizer.encode(self.train, cut), tokenizer.encode(self.valid), tokenizer)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocabulary if self.tokenizer else VOCABULARY

    @property
    def noun(self) -> str:
        return "tokens" if self.tokenizer else "bytes"

    @cached_property
    def _lengths(self) -> Tensor:
        return token_bytes(self.tokenizer) if self.tokenizer else torch.ones(VOCABULARY, dtype=torch.int64)

    def bytes_in(self, tokens: Tensor) -> int:
        """Bytes of text that tokens stand for. Raises DataError if that is unknown."""
        return int(self._lengths[tokens.long().cpu()].sum())

    def bits(self, nats: float, tokens: Tensor) -> float:
        """Bits per *byte*, from the mean nats per token, so that byte and token models compare."""
        return nats * tokens.numel() / self.bytes_in(tokens) / math.log(2)

    def batch(self, seed: int, step: int, sequences: int, length: int) -> Tensor:
        """Training windows (sequences, length) int64, a pure function of (seed, step), so that a run can resume."""
        draws = uniforms(seed, Purpose.WINDOWS, 0, 1, sequences, step)[0]
        return windows(self.train, (draws * (len(self.train) - length)).astype(np.int64), length).to(self.device)

    def valid_batch(self, sequences: int, length: int) -> Tensor:
        """Evenly spaced validation windows (sequences, length) int64."""
        starts = np.linspace(0, len(self.valid) - length, sequences).astype(np.int64)
        return windows(self.valid, starts, length).to(self.device)

    def require(self, length: int) -> None:
        """Raise DataError unless both texts hold a window of `length` tokens."""
        for what, text in (("training", self.train), ("validation", self.valid)):
            if len(text) < length:
                raise DataError(
                    f"{self.name}: the {what} text has {len(text)} {self.noun}, but one window needs {length}; "
                    "give more text, or a smaller context_length"
                )

    def digest(self) -> str:
        """SHA-256 of the training tokens, for the manifest."""
        return hashlib.sha256(self.train.numpy().tobytes()).hexdigest()


def windows(text: Tensor, starts: np.ndarray, length: int) -> Tensor:
    """Slices of `text` at `starts`: (len(starts), length) int64."""
    return text[torch.from_numpy(starts)[:, None] + torch.arange(length)].long()


def load_corpus(path: Path | None, tokenizer: Path | None = None) -> Corpus:
    """Read a file or folder of text; without a path, the text that ships with Python.

    :param tokenizer: a tokenizer.json for text in its tokens; without it, bytes.

    A folder's `train.txt` and `valid.txt` files are the two parts; otherwise the last 5 % is held out.
    Raises DataError for a missing path, text that is not UTF-8, or too little text.
    """
    if tokenizer is not None:
        return load_corpus(path).in_tokens(TextTokenizer.read(tokenizer), cut=True)
    if path is None:
        from pydoc_data.topics import topics

        return _split("python-docs", "\n".join(topics[name] for name in sorted(topics)).encode())
    if path.is_file():
        return _split(path.name, read_utf8(path))
    if not path.is_dir():
        what = f"{path} is neither a file nor a folder" if exists(path) else f"no text at {path}"
        raise DataError(f"{what}: give a file or a folder of UTF-8 text")
    files = sorted(p for p in path.rglob("*.txt") if p.is_file())
    if not files:
        raise DataError(f"no .txt file under {path}: name its files so, or give one file, with any name")
    train = [p for p in files if p.name == "train.txt"]
    valid = [p for p in files if p.name == "valid.txt"]
    if train and valid:
        return _checked(path.absolute().name, b"".join(map(read_utf8, train)), b"".join(map(read_utf8, valid)))
    return _split(path.absolute().name, b"\n".join(map(read_utf8, files)))


def read_utf8(path: Path) -> bytes:
    """A file's text. Raises DataError if it cannot be read or is not UTF-8."""
    with file_errors(DataError, f"cannot read {path}"):
        raw = path.read_bytes()
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); convert it or leave it out") from None
    return raw


def _split(name: str, raw: bytes) -> Corpus:
    # Hold out the end, not a sample: windows of validation text must not overlap training text.
    held_out = max(int(len(raw) * VALID_SHARE), MIN_BYTES // 2)
    if len(raw) < MIN_BYTES + held_out:
        raise DataError(f"{name}: {len(raw)} bytes of text are too few; give at least {MIN_BYTES + held_out}")
    return _checked(name, raw[:-held_out], raw[-held_out:])


def _checked(name: str, train: bytes, valid: bytes) -> Corpus:
    if len(train) < MIN_BYTES:
        raise DataError(f"{name}: {len(train)} bytes of training text are too few; give at least {MIN_BYTES}")
    if not valid:
        raise DataError(f"{name}: the validation text is empty")
    halves = (torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()) for raw in (train, valid))
    return Corpus(name, next(halves), next(halves))


# Updates and checkpoints are float32 on the CPU. Text and noise are also drawn on the CPU, so that a step's batch is
# the same on every device.


def precision(bfloat16: bool, device: str) -> torch.autocast:
    """A context for products in bfloat16, if requested and fast on `device`; else in float32."""
    # with only AVX2, a processor computes bfloat16 in software, and a product takes 65 times as long
    quick = device != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AVX10", "AMX"))
    return torch.autocast(device, dtype=torch.bfloat16, enabled=bfloat16 and quick)


PIECE_BYTES = 1 << 20
MAX_CUT = 512
MAX_TOKENIZER_BYTES = 64 << 20
# A byte-level vocabulary includes every byte; with more tokens than this, the head would dwarf the models trained here.
MIN_VOCABULARY, MAX_VOCABULARY = 257, 1 << 16


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer.json: converts text to tokens, and knows the bytes of each token."""

    json: str

    @classmethod
    def read(cls, path: Path) -> TextTokenizer:
        """Raises DataError for a file that is not a tokenizer, InputError without the package."""
        try:
            with file_errors(DataError, f"cannot read {path}"):
                if regular(path).stat().st_size > MAX_TOKENIZER_BYTES:
                    raise DataError(f"{path} is larger than {MAX_TOKENIZER_BYTES >> 20} MB: it is not a tokenizer.json")
                made = cls(path.read_text(encoding="utf-8"))
            if not made.vocabulary:
                raise ValueError("it has no tokens")
        except (ValueError, CheckpointError) as error:
            raise DataError(f"{path} is not a tokenizer.json ({error}): run `onesweep train tokenizer`") from None
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
        """Convert bytes (bytes,) uint8 to tokens (tokens,) int32.

        :param cut: also as prompts may end: in pieces of 1 to MAX_CUT characters, each tokenized by itself.
        """
        # A prompt may end within a word, and its tokens then differ from those of the whole text. A model not trained
        # on such ends continues them badly.
        found = list[Tensor]()
        for number, piece in enumerate(_pieces(text)):
            encoded = self.encoding.encode_batch(_cut(piece, number) if cut else [piece], add_special_tokens=False)
            found += (torch.tensor(each.ids, dtype=torch.int32) for each in encoded)
        return torch.cat(found)


def _pieces(text: Tensor) -> Iterator[str]:
    """Yield text in pieces that end at a line if possible: a tokenizer needs many times the memory of its input."""
    raw = text.numpy().tobytes()
    begin = 0
    while begin < len(raw):
        end = begin + PIECE_BYTES
        if end < len(raw):
            end = raw.rfind(b"\n", begin, end) + 1 or end
        yield raw[begin:end].decode(errors="ignore")
        begin = end


def _cut(text: str, number: int) -> list[str]:
    """Cut `text` into pieces of random lengths, the same every time."""
    lengths = 1 + (uniforms(number, Purpose.WINDOWS, 0, 1, 2 * len(text) // MAX_CUT + 64)[0] * MAX_CUT).astype(int)
    ends = lengths.cumsum()
    cuts = [0, *(end for end in ends.tolist() if end < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def token_bytes(tokenizer: TextTokenizer) -> Tensor:
    """Number of bytes of each token of a byte-level vocabulary: (vocabulary,) int64.

    Raises DataError for another kind of tokenizer, whose tokens have no fixed number of bytes.
    """
    known = set(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
    lengths = torch.zeros(tokenizer.vocabulary, dtype=torch.int64)
    for token, number in tokenizer.encoding.get_vocab(with_added_tokens=False).items():
        if not known.issuperset(token):
            raise DataError(f"the tokenizer is not byte-level (token {token!r}), so its bits per byte are undefined")
        lengths[number] = len(token)
    return lengths


def train_tokenizer(text: Tensor, vocabulary: int) -> TextTokenizer:
    """Train a byte-level BPE of `vocabulary` tokens, none special. text: (bytes,) uint8. Raises InputError."""
    if not MIN_VOCABULARY <= vocabulary <= MAX_VOCABULARY:
        raise InputError(f"--vocabulary must be from {MIN_VOCABULARY} to {MAX_VOCABULARY}, not {vocabulary}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(_pieces(text), trainer)
    found: int = made.get_vocab_size()
    if found < vocabulary:
        raise InputError(f"this text yields only {found} tokens, but --vocabulary is {vocabulary}; give more text")
    return TextTokenizer(made.to_str())
