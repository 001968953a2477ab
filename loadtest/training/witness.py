"""What workers themselves know of their updates: read from their states and logs, which no coordinator writes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

STATE, PAYLOAD, MODULE = "worker.safetensors", "payload0", "module/"
HANDED_IN = re.compile(r"round (\d+) of (\S+) is handed in")

Tensors = Mapping[str, NDArray[np.generic]]
Numbers = NDArray[np.float32]
Shape = tuple[int, ...]
Reader = Callable[[bytes, Shape], tuple[Numbers, int]]
"""A tensor of this shape at the begin of a payload, and how many bytes it takes."""


@dataclass(frozen=True)
class Statement:
    """An update as its worker made it."""

    worker: str
    part: str
    round: int
    id: str
    sha256: str
    """Of its tensors, computed here."""


class Witness:
    """Looks at the states of workers again and again; what they have not handed in yet is in there, too."""

    def __init__(self, codec: str) -> None:
        """:param codec: of updates; of one that is not in READERS, nothing is hashed."""
        self._read = READERS.get(codec)
        self.statements: dict[tuple[str, str], Statement] = {}
        """By part and id."""
        self._seen: dict[Path, int] = {}

    def look(self, states: Mapping[str, Path]) -> None:
        """:param states: directories by the worker's name."""
        if self._read is None:
            return
        for worker, directory in states.items():
            path = directory / STATE
            try:
                changed = path.stat().st_mtime_ns
                if self._seen.get(path) == changed:
                    continue
                found = read_pending(path, worker, self._read)
            except (OSError, SafetensorError):
                continue  # none yet, or just replaced
            self._seen[path] = changed
            if found is not None:
                self.statements[found.part, found.id] = found


def read_pending(path: Path, worker: str, read: Reader) -> Statement | None:
    """The update that lies in a worker's state, as float32; None where there is none."""
    with safe_open(path, framework="numpy") as file:
        record = json.loads((file.metadata() or {})["record"])
        (piece,) = record["pieces"]  # a part that travels whole
        if (pending := piece["pending"]) is None:
            return None
        payload: bytes = file.get_tensor(PAYLOAD).tobytes()
        names = sorted(name for name in file.keys() if name.startswith(MODULE))  # noqa: SIM118
        shapes = {name.removeprefix(MODULE): tuple(file.get_slice(name).get_shape()) for name in names}
    return Statement(
        worker, record["part"], pending["round"], pending["id"], tensors_digest(_cut(payload, shapes, read))
    )


def tensors_digest(tensors: Tensors) -> str:
    """SHA-256 over names in order, shapes, kinds and bytes, as the log has it."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        found.update(f"{name} {tuple(array.shape)} torch.{array.dtype.name}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def handed_in(logs: Iterable[Path]) -> set[tuple[str, int]]:
    """Parts and rounds of which a worker heard that its update was taken, by its own logs."""
    found = set()
    for log in logs:
        if log.exists():
            found |= {(part, int(number)) for number, part in HANDED_IN.findall(log.read_text(errors="replace"))}
    return found


def _cut(payload: bytes, shapes: Mapping[str, Shape], read: Reader) -> Tensors:
    start, tensors = 0, dict[str, NDArray[np.generic]]()
    for name in sorted(shapes):
        tensors[name], size = read(payload[start:], shapes[name])
        start += size
    return tensors


def _fp32(data: bytes, shape: Shape) -> tuple[Numbers, int]:
    numbers = math.prod(shape)
    return np.frombuffer(data, "<f4", numbers).reshape(shape), 4 * numbers


def _int8(data: bytes, shape: Shape) -> tuple[Numbers, int]:
    """A scale for each row, then the rows."""
    rows, numbers = shape[0] if len(shape) > 1 else 1, math.prod(shape)
    scales = np.frombuffer(data, "<f4", rows)
    steps = np.frombuffer(data, np.int8, numbers, 4 * rows).astype(np.float32).reshape(rows, -1)
    return (steps * scales[:, None]).reshape(shape), 4 * rows + numbers


READERS: Mapping[str, Reader] = {"fp32": _fp32, "int8": _int8}
"""Written for this purpose, so that an error in the codecs is not looked at through itself."""
