"""The state of an unfinished run: weights, optimizer state and step in one safetensors file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.checkpoint import replace_file
from stages.errors import ResumeError
from trainer.optimizer import OptimizerSet

MODULE = "module."


@dataclass(frozen=True)
class Reached:
    """How far a run was when its state was saved."""

    step: int
    spent_s: float = 0.0


def state_path(directory: Path, name: str) -> Path:
    """Where the run `name` keeps its state."""
    return directory / f"{name}.state.safetensors"


def save_state(path: Path, module: nn.Module, optimizers: OptimizerSet, reached: Reached, identity: str) -> None:
    """Replace the state atomically. Raises CheckpointError, with the old state whole, when it cannot be written."""
    placed = {MODULE + name: tensor for name, tensor in module.state_dict().items()} | optimizers.tensors()
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
    # a state without a digest is from before there was one
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
