"""What a worker has on its disk, to go on after a kill at any instruction: one file, which is replaced whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.checkpoint import replace_file
from stages.errors import ResumeError
from trainer.rounds.tensors import Tensors, digest

STATE_NAME = "worker.safetensors"
PAYLOAD = "payload"


@dataclass(frozen=True)
class Pending:
    """An update that nobody has judged yet."""

    id: str
    round: int
    base_version: int
    steps: int
    sequences: int
    losses: dict[str, float]
    """Of the last step, in nats."""
    payload: bytes = field(repr=False)


@dataclass
class PieceStanding:
    """How far a worker is with one fragment."""

    finished: int = -1
    """The last round that it has trained, or gave up."""
    round: int | None = None
    """The round that it is in; None between two."""
    base_version: int = 0
    steps: int = 0
    """Done in this round."""
    held_version: int = 0
    """Of the fragment, among the tensors."""
    own_in: int | None = None
    """The version that has our last update in it; None while that is not known."""
    over: bool = False
    """Whether its last round is made."""
    pending: Pending | None = None


@dataclass
class Standing:
    """How far a worker is."""

    part: str
    turn: int = 0
    """The fragment that is exchanged next."""
    steps: int = 0
    """Done since the last exchange."""
    pieces: list[PieceStanding] = field(default_factory=lambda: [PieceStanding()])


def save_worker(path: Path, run: str, standing: Standing, groups: dict[str, Tensors]) -> None:
    """Replace the state. Raises CheckpointError, with the old one whole, when it cannot be written.

    :param groups: tensors by group and name.
    """
    tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    record: dict[str, Any] = {**asdict(standing), "run": run}
    for number, piece in enumerate(standing.pieces):
        if piece.pending is not None:
            tensors[f"{PAYLOAD}{number}"] = torch.frombuffer(bytearray(piece.pending.payload), dtype=torch.uint8)
            del record["pieces"][number]["pending"]["payload"]
    text = json.dumps(record, sort_keys=True)
    metadata = {"record": text, "sha256": _digest(text, tensors)}
    replace_file(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_worker(path: Path) -> tuple[str, Standing, dict[str, Tensors]]:
    """Run, standing and groups of a state. Raises ResumeError when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["record"]
        if metadata["sha256"] != _digest(text, tensors):
            raise ValueError("it does not have the recorded SHA-256")
        record = json.loads(text)
        run, pieces = record.pop("run"), list[PieceStanding]()
        for number, piece in enumerate(record.pop("pieces")):
            if (pending := piece.pop("pending")) is not None:
                pending = Pending(**pending, payload=tensors.pop(f"{PAYLOAD}{number}").numpy().tobytes())
            pieces.append(PieceStanding(**piece, pending=pending))
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        return run, Standing(**record, pieces=pieces), groups
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{path} is damaged ({error}); delete it to begin anew") from None


def _digest(record: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(f"{record}\n{digest(tensors)}".encode()).hexdigest()
