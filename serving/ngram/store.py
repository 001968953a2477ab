"""The file of an n-gram model: a safetensors file beside a checkpoint, with what it belongs to in its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from serving.ngram.levels import MAX_ORDER, MAX_SYMBOLS, MIN_ORDER, Level, Ngrams
from stages.errors import CheckpointError, InputError
from stages.private_files import PUBLIC, write_file

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
    """Those of `path`, for symbols of this vocabulary and tokenizer (see `Ngrams`). Raises CheckpointError.

    What the file says of itself is looked at before an array is read.
    """
    try:
        with safe_open(path, "numpy") as file:
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
