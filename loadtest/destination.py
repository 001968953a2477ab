"""Where figures go besides the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.destination import check_destination, write_destination

__all__ = ["check_destination", "write_json"]


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Raises OnesweepError when the disk is full or the folder has gone meanwhile."""
    write_destination(path, json.dumps(record, indent=2) + "\n")
