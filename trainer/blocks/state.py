"""Files of a run: its resumable state (weights, optimizer, step), its log of JSON lines, its lock."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.checkpoint.checkpoint import replace_file
from stages.errors import CheckpointError, ResumeError
from trainer.blocks.optimizer import OptimizerSet

MODULE = "module."


@dataclass(frozen=True)
class Reached:
    """The step and time of a run when its state was saved."""

    step: int
    spent_s: float = 0.0


def state_path(directory: Path, name: str) -> Path:
    """The state file of the run `name`."""
    return directory / f"{name}.state.safetensors"


def save_state(path: Path, module: nn.Module, optimizers: OptimizerSet, reached: Reached, identity: str) -> None:
    """Replace the state atomically. Raises CheckpointError, with the old state whole, when it cannot be written."""
    placed = {MODULE + name: tensor for name, tensor in module.state_dict().items()} | optimizers.tensors()
    # On the CPU, so that a run stopped on a GPU can continue anywhere.
    tensors = {name: tensor.cpu() for name, tensor in placed.items()}
    metadata = {
        "step": str(reached.step),
        "spent_s": repr(reached.spent_s),
        "identity": identity,
        "sha256": _digest(tensors),
    }
    replace_file(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_state(path: Path, module: nn.Module, optimizers: OptimizerSet, identity: str) -> Reached:
    """Restore a state and return when it was saved.

    Raises ResumeError when it is damaged or of another run.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ResumeError(f"{path} cannot be read ({error}); delete it to start anew") from None
    if metadata.get("identity") != identity:
        raise ResumeError(
            f"{path} belongs to a run with other settings or data; "
            "give the same ones to go on, another --out, or delete it to start anew"
        )
    # States of earlier versions have no digest.
    # safetensors checks its header only; a flipped bit in a tensor would go unnoticed.
    if metadata.get("sha256", "") not in ("", _digest(tensors)):
        raise ResumeError(f"{path} is damaged: its tensors do not have the recorded SHA-256; delete it to start anew")
    try:
        weights = {name.removeprefix(MODULE): tensor for name, tensor in tensors.items() if name.startswith(MODULE)}
        module.load_state_dict(weights)
        optimizers.restore(tensors)
        return Reached(int(metadata["step"]), float(metadata["spent_s"]))
    except (KeyError, ValueError, RuntimeError) as error:
        raise ResumeError(f"{path} does not fit this run ({error}); delete it to start anew") from None


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().numpy().reshape(-1).view("uint8").data)
    return digest.hexdigest()


class StepLog:
    """The log of a run: one JSON object a line, each with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. Raises CheckpointError when it cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror}; free some space and run again to go on"
            ) from None

    def flush(self) -> None:
        """Flush to disk, so that a state saved afterwards never lacks its log lines."""
        if self.path.exists():
            with self.path.open("rb") as log:
                os.fsync(log.fileno())

    def cut(self, step: int) -> None:
        """Drop the records after `step`, a final evaluation, and a line that a kill left half written."""
        kept = [r for r in read_records(self.path) if r["step"] <= step and not r.get("final")]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        replace_file(self.path, lambda path: path.write_text(text, encoding="utf-8"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a log; none if there is no log yet."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


@contextmanager
def exclusive(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Hold the lock file `path`; the kernel releases it when its holder dies.

    If another process has it: wait, or raise ResumeError(`refusal`) if given.
    """
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError:
            raise ResumeError(str(refusal)) from None
        yield
