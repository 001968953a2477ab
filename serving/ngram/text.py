"""A user's text in a model's symbols, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.ngram.levels import MAX_SYMBOLS
from serving.spelling import Spelling
from stages.errors import InputError

PIECE_CHARACTERS = 1 << 20
LINE_CHARACTERS = 1 << 16
"""A piece goes on to the end of its line, if that is not further: words are not cut then."""


def symbols_of(paths: Sequence[Path], spelling: Spelling) -> NDArray[np.uint32]:
    """The files' symbols, one file after the other: (positions,). Raises InputError; blocks."""
    parts, count = list[NDArray[np.uint32]](), 0
    for path in paths:
        for piece in _pieces(path):
            parts.append(spelling.alphabet.decode(spelling.plain(piece)).numpy().astype(np.uint32))
            count += len(parts[-1])
            if count > MAX_SYMBOLS:
                raise InputError(
                    f"the text has more than {MAX_SYMBOLS} {spelling.noun}, as many as are fitted to: give less of it"
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
