"""The n-grams of one length, and all lengths together: arrays that are searched, not walked."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from onesweep.serving.modes.drafters.base import LocalModel
from onesweep.serving.modes.tokenizer import BYTES_NAME, Tokenizer
from onesweep.stages.checkpoint.checkpoint import file_digest
from onesweep.stages.errors import CheckpointError, InputError, library_errors, regular
from onesweep.stages.model.draft_tree import Forks, LocalText
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.wire.secret_files import PUBLIC, write_file

MIN_ORDER, MAX_ORDER = 2, 8
# Of text that a model is fitted to: no level has more n-grams.
MAX_SYMBOLS = 1 << 24
# How far from 1 the odds of a damaged file may add up.
NEARLY = 1e-3


@dataclass(frozen=True)
class Level:
    """N-grams of one length n, in the order of their contexts, which are the n-grams of length n - 1.

    What follows context i are the entries from begins[i] to begins[i + 1], in the order of their symbols.
    """

    # (contexts + 1,)
    begins: NDArray[np.uint32]
    # Of each context: the weight of what the context one symbol shorter says. (contexts,)
    lefts: NDArray[np.float32]
    # The last symbol of each: (n-grams,)
    symbols: NDArray[np.uint32]
    # What its context gives it by itself: (n-grams,)
    shares: NDArray[np.float32]

    def following(self, context: int) -> slice:
        """The entries that follow a context."""
        return slice(int(self.begins[context]), int(self.begins[context + 1]))

    def find(self, context: int, symbol: int) -> int:
        """The entry of `symbol` after a context; -1 where it was never seen there."""
        found = self.following(context)
        at = found.start + int(np.searchsorted(self.symbols[found], symbol))
        return at if at < found.stop and self.symbols[at] == symbol else -1

    def check(self, contexts: int, vocabulary: int) -> None:
        """Raise InputError unless this can be a level after so many contexts."""
        begins, count = self.begins.astype(np.int64), len(self.symbols)
        if len(begins) != contexts + 1 or len(self.lefts) != contexts or len(self.shares) != count:
            raise InputError("its arrays do not fit each other")
        if begins[0] != 0 or begins[-1] != count or (np.diff(begins) < 0).any():
            raise InputError("its contexts are not in order")
        first = np.zeros(count + 1, dtype=bool)
        first[begins] = True
        rising = np.diff(self.symbols.astype(np.int64)) > 0
        if count and (self.symbols.max() >= vocabulary or not rising[~first[1:-1]].all()):
            raise InputError(f"its symbols are not in order, or not below {vocabulary}")
        if not (_odds(self.shares) and _odds(self.lefts)):
            raise InputError("its odds are not between 0 and 1")
        totals = self.lefts.astype(np.float64) + _sums(self.shares, begins)
        if np.abs(totals - 1).max(initial=0) > NEARLY:
            raise InputError("its odds do not add up to 1")


@dataclass(frozen=True)
class Ngrams:
    """A fitted model: level k - 1 has the n-grams of length k."""

    levels: tuple[Level, ...]
    vocabulary: int
    # What its symbols are, as `Tokenizer.id`.
    tokenizer: str = BYTES_NAME

    @property
    def order(self) -> int:
        return len(self.levels)

    @property
    def count(self) -> int:
        return sum(len(level.symbols) for level in self.levels)

    def check(self) -> None:
        """Raise InputError unless every context and symbol is where it can be found."""
        contexts = 1
        for length, level in enumerate(self.levels, 1):
            try:
                level.check(contexts, self.vocabulary)
            except InputError as error:
                raise InputError(f"its {length}-grams are damaged: {error}") from None
            contexts = len(level.symbols)

    def base(self) -> NDArray[np.float64]:
        """p of every symbol where nothing is known of what is before it: (vocabulary,)."""
        level = self.levels[0]
        p = np.full(self.vocabulary, level.lefts[0] / self.vocabulary, dtype=np.float64)
        p[level.symbols] += level.shares
        return np.asarray(p / p.sum())

    def contexts(self, ending: Sequence[int]) -> list[tuple[Level, int]]:
        """Contexts that a text with this ending has, shortest first: a level, and the context in it."""
        found = list[tuple[Level, int]]()
        for length in range(1, min(len(ending), self.order - 1) + 1):
            context = 0
            for level, symbol in zip(self.levels, ending[len(ending) - length :], strict=False):
                context = level.find(context, symbol)
                if context < 0:
                    return found  # what was not seen has no longer context that was
            found.append((self.levels[length], context))
        return found


def _odds(values: NDArray[np.float32]) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())  # false for NaN too


def _sums(values: NDArray[np.float32], begins: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum of the values from each of `begins` to the next."""
    running = np.concatenate([[0.0], values.astype(np.float64).cumsum()])
    return np.asarray(running[begins[1:]] - running[begins[:-1]])


# What an n-gram model says about the next symbol.

Floats = NDArray[np.float64]


class NgramModel:
    """Reads endings of texts, of `order` - 1 symbols at most."""

    def __init__(self, ngrams: Ngrams) -> None:
        self.ngrams, self._base = ngrams, ngrams.base()

    def probabilities(self, ending: Sequence[int]) -> Floats:
        """Probability of every symbol after a text with this ending: (vocabulary,), together 1."""
        p = self._base.copy()
        for level, context in self.ngrams.contexts(ending):
            found = level.following(context)
            p *= level.lefts[context]
            p[level.symbols[found]] += level.shares[found]
        return p

    def cross_entropy(self, symbols: Sequence[int]) -> float:
        """Mean nats of each symbol after those before it."""
        nats = 0.0
        for at, symbol in enumerate(symbols):
            p = float(self._base[symbol])
            for level, context in self.ngrams.contexts(symbols[max(at - self.ngrams.order + 1, 0) : at]):
                found = level.find(context, symbol)
                p = p * float(level.lefts[context]) + (float(level.shares[found]) if found >= 0 else 0.0)
            nats -= math.log(p)
        return nats / max(len(symbols), 1)


# The file of an n-gram model: a safetensors file beside a checkpoint, with what it belongs to in its metadata.

FORMAT = "onesweep-ngram-1"
_TYPES = {"begins": "U32", "lefts": "F32", "symbols": "U32", "shares": "F32"}


def write_ngrams(path: Path, ngrams: Ngrams) -> None:
    """Raises InputError."""
    arrays = {
        f"{name}.{length}": getattr(level, name) for length, level in enumerate(ngrams.levels, 1) for name in _TYPES
    }
    metadata = {
        "format": FORMAT,
        "order": str(ngrams.order),
        "vocabulary": str(ngrams.vocabulary),
        "tokenizer": ngrams.tokenizer,
    }
    write_file(path, save(arrays, metadata), PUBLIC)


def read_ngrams(path: Path, vocabulary: int, tokenizer: str) -> Ngrams:
    """Read the n-grams of `path`, for symbols of this vocabulary and tokenizer (see `Ngrams`). Raises CheckpointError.

    What the file says of itself is looked at before an array is read.
    """
    try:
        with safe_open(regular(path), "numpy") as file:
            order = _order(file.metadata() or {}, vocabulary, tokenizer)
            names = {f"{name}.{length}": kind for length in range(1, order + 1) for name, kind in _TYPES.items()}
            if set(file.keys()) != set(names):
                raise InputError("it does not have the arrays of its order")
            for name, kind in names.items():
                part = file.get_slice(name)
                if part.get_dtype() != kind or len(part.get_shape()) != 1 or part.get_shape()[0] > MAX_SYMBOLS + 1:
                    raise InputError(f"its array {name} is not a row of at most {MAX_SYMBOLS + 1} numbers of {kind}")
            arrays: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in names}
        levels = (Level(**{name: arrays[f"{name}.{length}"] for name in _TYPES}) for length in range(1, order + 1))
        ngrams = Ngrams(tuple(levels), vocabulary, tokenizer)
        ngrams.check()
        return ngrams
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, InputError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; fit it again with `onesweep ngram`") from None


def _order(metadata: dict[str, str], vocabulary: int, tokenizer: str) -> int:
    if metadata.get("format") != FORMAT:
        raise InputError(f"it is no n-gram model of the format {FORMAT}")
    if metadata.get("vocabulary") != str(vocabulary):
        fitted = metadata.get("vocabulary", "no")[:20]
        raise InputError(f"it was fitted to {fitted} different symbols, the model has {vocabulary}")
    if metadata.get("tokenizer") != tokenizer:
        raise InputError("it was fitted with another tokenizer than the model's")
    orders = [str(order) for order in range(MIN_ORDER, MAX_ORDER + 1)]
    if metadata.get("order") not in orders:
        raise InputError(f"its order is none of {', '.join(orders)}")
    return int(metadata["order"])


# The n-gram model as a drafter.

# It looks at a text's end only, however long that is.
ANY_LENGTH = 1 << 31


class NgramDrafter(LocalModel):
    """Drafts what followed the last few symbols in the text that it was fitted to."""

    def __init__(self, path: Path, vocabulary: int, tokenizer: str) -> None:
        """:param vocabulary: and :param tokenizer: those of the hosts' model. Raises CheckpointError."""
        self.model = NgramModel(read_ngrams(path, vocabulary, tokenizer))
        super().__init__(Alphabet(vocabulary), tokenizer, file_digest(path), ANY_LENGTH)

    def open(self, capacity: int) -> LocalText:
        return _NgramText(self)

    def logits(self, endings: Sequence[Sequence[int]]) -> Tensor:
        """ln of the odds after texts with these endings: (endings, vocabulary) float32."""
        rows = [self.model.probabilities(ending) for ending in endings]
        return torch.from_numpy(np.log(np.stack(rows)).astype(np.float32))


class _NgramText(LocalText):
    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter, self._ending = drafter, list[int]()

    def logits_after(self, text: bytes) -> Tensor:
        alphabet, most = self.drafter.alphabet, self.drafter.model.ngrams.order - 1
        self._ending = alphabet.symbols(alphabet.cut(text, max(alphabet.count(text) - most, 0)))
        return self.drafter.logits([self._ending])

    def fork(self, count: int, room: int) -> Forks:
        return _NgramForks(self.drafter, [self._ending] * count)


class _NgramForks(Forks):
    def __init__(self, drafter: NgramDrafter, endings: list[list[int]]) -> None:
        self.drafter, self._endings = drafter, endings

    def read(self, symbols: NDArray[np.int64]) -> Tensor:
        most = self.drafter.model.ngrams.order - 1
        grown = zip(self._endings, symbols.tolist(), strict=True)
        self._endings = [[*ending, symbol][-most:] for ending, symbol in grown]
        return self.drafter.logits(self._endings)

    def select(self, branches: NDArray[np.int64]) -> None:
        self._endings = [self._endings[branch] for branch in branches.tolist()]


# Fits n-grams to a text: interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.8).
#
# p(w | h) = max(c(hw) - D, 0) / c(h) + D T(h) / c(h) p(w | h'), with c counts for the longest histories and numbers
# of
# different symbols before hw for the shorter ones, T(h) the different symbols after h, h' the history without its
# first
# symbol, D = n1 / (n1 + 2 n2) for each length (Ney et al. 1994), and the uniform distribution below the shortest.

# Of a text so small or odd that it has no n-gram that was seen once, or none that was seen twice.
LEAST_DISCOUNT, MOST_DISCOUNT = 0.1, 0.95
_SHIFT, _LOW = np.uint64(32), np.uint64((1 << 32) - 1)

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]


def fit(symbols: NDArray[np.uint32], vocabulary: int, order: int, tokenizer: str = BYTES_NAME) -> Ngrams:
    """Levels 1 to `order` of a text. symbols: (positions,), below `vocabulary`. Raises InputError."""
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise InputError(f"the order of an n-gram model is {MIN_ORDER} to {MAX_ORDER}, not {order}")
    if not order < len(symbols) <= MAX_SYMBOLS:
        most = f"more than {order}, at most {MAX_SYMBOLS}"
        raise InputError(f"a text of {len(symbols)} symbols; n-grams are fitted to {most}")
    keys, sizes, counts = list[Keys](), [1], list[Numbers]()
    ids = np.zeros(len(symbols) + 1, dtype=np.int64)  # of the n-gram that ends at each position: at first the empty one
    for length in range(1, order + 1):
        runs = ids[:-1].astype(np.uint64) << _SHIFT | symbols[length - 1 :].astype(np.uint64)
        found, first, inverse, times = np.unique(runs, return_index=True, return_inverse=True, return_counts=True)
        if length > 1:
            counts[-1] = np.bincount(ids[1:][first], minlength=sizes[-1])  # what each was seen after
        keys.append(found)
        sizes.append(len(found))
        counts.append(times)
        ids = inverse
    levels = [_level(*each) for each in zip(keys, sizes, counts, strict=False)]
    return Ngrams(tuple(levels), vocabulary, tokenizer)


def _level(keys: Keys, contexts: int, counts: Numbers) -> Level:
    """keys: each context's number and its symbol, sorted; counts: of each."""
    parents = (keys >> _SHIFT).astype(np.int64)
    begins = np.searchsorted(parents, np.arange(contexts + 1))
    totals = np.bincount(parents, counts, minlength=contexts)
    shares = np.maximum(counts - _discount(counts), 0) / np.maximum(totals[parents], 1)
    lefts = np.clip(1 - np.bincount(parents, shares, minlength=contexts), 0, 1)
    return Level(
        begins.astype(np.uint32), lefts.astype(np.float32), (keys & _LOW).astype(np.uint32), shares.astype(np.float32)
    )


def _discount(counts: Numbers) -> float:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return min(max(once / max(once + 2 * twice, 1), LEAST_DISCOUNT), MOST_DISCOUNT)


# A user's text in a model's symbols, piece by piece.

PIECE_CHARACTERS = 1 << 20
# A piece continues to the end of its line, if that is not further: words are not cut then.
LINE_CHARACTERS = 1 << 16


def symbols_of(paths: Sequence[Path], tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """The files' symbols, one file after the other: (positions,). Raises InputError; blocks."""
    parts, count = list[NDArray[np.uint32]](), 0
    for path in paths:
        for piece in _pieces(path):
            with library_errors(lambda problem, path=path: InputError(f"{path}: {problem}")):  # type: ignore[misc]
                parts.append(tokenizer.alphabet.decode(tokenizer.encode_piece(piece)).numpy().astype(np.uint32))
            count += len(parts[-1])
            if count > MAX_SYMBOLS:
                raise InputError(
                    f"the text has more than {MAX_SYMBOLS} {tokenizer.noun}, as many as are fitted to: give less of it"
                )
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)


def _pieces(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(PIECE_CHARACTERS):
                yield piece + file.readline(LINE_CHARACTERS)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason}") from None
