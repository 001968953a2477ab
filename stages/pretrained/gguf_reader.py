"""The reader of the package gguf, which by itself goes on for as many elements as a damaged file says it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stages.errors import InputError

MAX_ELEMENTS = 1 << 22
"""Of an array: tokens of the largest vocabulary."""


def gguf_package() -> Any:  # noqa: ANN401
    """Raises InputError where it is missing."""
    try:
        import gguf
    except ImportError:
        raise InputError("a .gguf file is read with the package gguf: pip install 'onesweep[pretrained]'") from None
    return gguf


def open_gguf(path: Path) -> Any:  # noqa: ANN401
    """Its `GGUFReader` of a file. Raises whatever a damaged file makes that raise, and InputError."""
    gguf = gguf_package()
    base: Any = gguf.GGUFReader

    class Reader(base):
        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:  # noqa: ANN401
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too soon")
            return super()._get(offset, dtype, count, **order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # noqa: ANN401
            if raw_type == gguf.GGUFValueType.ARRAY:
                count = self._get(orig_offs + 4, np.uint64)[0]  # after the type of the elements
                if count > MAX_ELEMENTS:
                    raise ValueError(f"an array of {count} elements; at most {MAX_ELEMENTS} are read")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(path)
