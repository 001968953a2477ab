"""The texts that a model may not travel without."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY|ACCEPTABLE_USE)([._-][A-Za-z0-9._-]*)?", re.IGNORECASE)
MAX_TEXTS = 8
MAX_TEXT_BYTES = 1 << 20


def licence_texts(folder: Path) -> dict[str, bytes]:
    """Those that lie in a folder: file name -> text."""
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file())
    return {path.name: path.read_bytes() for path in paths[:MAX_TEXTS] if path.stat().st_size <= MAX_TEXT_BYTES}
