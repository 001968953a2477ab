"""Files of a run: its resumable state and its log of JSON lines."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from stages.checkpoint.files import replace_file, sync
from stages.errors import CheckpointError, ResumeError, file_errors, regular


def save_state(path: Path, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Replace a state atomically. Raises CheckpointError, with the old state intact, if it cannot be written.

    :param record: JSON values.
    """
    # On the CPU, so that a run stopped on a GPU can resume anywhere.
    placed = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(record, sort_keys=True)
    metadata = {"record": text, "sha256": _digest(text, placed)}
    replace_file(path, lambda temporary: save_file(placed, temporary, metadata))


def load_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a state. Raises ResumeError if it is damaged."""
    try:
        with safe_open(regular(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ResumeError(f"cannot read {path} ({error}); delete it to start over") from None
    # safetensors checks only its header; a flipped bit in a tensor would go unnoticed.
    text = metadata.get("record", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise ResumeError(f"{path} is damaged: its tensors do not match the recorded SHA-256; delete it to start over")
    return json.loads(text), tensors


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names begin with `prefix`, keyed by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _digest(record: str, tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(f"{record}\n{digest(tensors)}".encode()).hexdigest()


def json_digest(record: object) -> str:
    """SHA-256 of a record, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names (sorted), shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.reshape(-1).view(uint8).numpy().data)  # NumPy lacks some types
    return found.hexdigest()


class StepLog:
    """The log of a run: one JSON object per line, each with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. Raises CheckpointError if it cannot be written."""
        with (
            file_errors(CheckpointError, f"cannot write {self.path}", "free some space and run again to resume"),
            self.path.open("a", encoding="utf-8") as log,
        ):
            log.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Sync to disk, so that a state saved afterwards never lacks its log lines."""
        if self.path.exists():
            sync(self.path)

    def cut(self, step: int) -> None:
        """Drop the records after `step`, a final evaluation, and a line half written at a kill."""
        kept = [r for r in read_records(self.path) if r["step"] <= step and not r.get("final")]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        replace_file(self.path, lambda path: path.write_text(text, encoding="utf-8"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """All complete records of a log; none if there is no log yet."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records
