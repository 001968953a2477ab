"""Progress on a terminal; nothing where the output is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def open_meter(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar for `total` texts, gone at the end; yields what to tell how many more are done."""
    from tqdm import tqdm

    with tqdm(desc=name, total=total, unit="text", leave=False, disable=None) as bar:
        yield bar.update
