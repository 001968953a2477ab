"""The proof, made without the coordinator's own code: nothing that was accepted is lost, nothing counts twice."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

STATE, PAYLOAD, MODULE = "worker.safetensors", "payload0", "module/"
HANDED_IN = re.compile(r"round (\d+) of (\S+) is handed in")

Tensors = Mapping[str, NDArray[np.generic]]
Numbers = NDArray[np.float32]
Shape = tuple[int, ...]
# Gives a tensor of this shape at the begin of a payload, and its size in bytes.
Reader = Callable[[bytes, Shape], tuple[Numbers, int]]


@dataclass(frozen=True)
class Statement:
    """An update as its worker made it."""

    worker: str
    part: str
    round: int
    id: str
    sha256: str  # of its tensors, computed here


class StateReader:
    """Collects the updates in the states of workers, which no coordinator writes, before they are handed in."""

    def __init__(self, codec: str) -> None:
        """:param codec: of updates; of one that is not in READERS, nothing is hashed."""
        self._read = READERS.get(codec)
        self.statements: dict[tuple[str, str], Statement] = {}  # by part and id
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
    """The update in a worker's state, as float32; None where there is none."""
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


# Decoders of their own, so that an error in the codecs cannot hide itself.
READERS: Mapping[str, Reader] = {"fp32": _fp32, "int8": _int8}


Record = dict[str, Any]


@dataclass
class Proof:
    """The comparisons that were made, and a sentence for each thing that should not be."""

    accepted: int = 0
    merged: int = 0
    left_out: int = 0  # of a merge, by their score on held-out text
    heard: int = 0  # times that a worker's own log has an update as taken
    compared: int = 0  # updates whose tensors were hashed where they were made, and again by the coordinator
    problems: list[str] = field(default_factory=list)


def prove(
    records: Sequence[Record],
    rounds: int,
    statements: Iterable[Statement],
    heard: Mapping[str, set[tuple[str, int]]],
    directory: Path,
) -> Proof:
    """:param records: the whole log; :param rounds: that each part should have made.

    :param heard: by worker, the parts and rounds of which it heard that its update was taken.

    :param directory: of the rounds: has the last versions.
    """
    proof = Proof()
    accepted: dict[tuple[str, str], Record] = {}
    merged: Counter[tuple[str, str]] = Counter()
    places: Counter[tuple[str, str, int]] = Counter()
    closed: Counter[str] = Counter()
    for record in records[1:]:
        part = record["part"]
        if record["kind"] == "closed":
            _follow(record, closed, accepted, merged, proof)
            continue
        places[record["worker"], part, record["round"]] += 1
        if record["kind"] == "accepted":
            if (part, record["id"]) in accepted:
                proof.problems.append(f"{record['id']} of {part} was accepted twice")
            accepted[part, record["id"]] = record
    proof.accepted, proof.merged = len(accepted), sum(merged.values()) - proof.left_out
    proof.problems += [f"{name} of {part} was merged {n} times" for (part, name), n in merged.items() if n > 1]
    proof.problems += [f"{name} of {part} was accepted and never merged" for part, name in accepted.keys() - merged]
    proof.problems += [
        f"{worker} handed in {n} updates for round {number} of {part}"
        for (worker, part, number), n in places.items()
        if n > 1
    ]
    parts = records[0]["parts"] if records else {}
    proof.problems += [f"{p} made {closed[p]} rounds of {rounds}" for p in parts if closed[p] != rounds]
    for worker, taken in heard.items():
        proof.heard += len(taken)
        lost = [(part, number) for part, number in sorted(taken) if places[worker, part, number] != 1]
        proof.problems += [f"{worker} heard that round {n} of {p} was taken; it is not in the log" for p, n in lost]
    for told in statements:
        known = accepted.get((told.part, told.id))
        if known is not None:
            proof.compared += 1
            if known["sha256"] != told.sha256 or known["worker"] != told.worker or known["round"] != told.round:
                proof.problems.append(f"{told.id} of {told.part} is not what {told.worker} made")
    _check_versions(records, directory, proof)
    return proof


def _follow(
    record: Record,
    closed: Counter[str],
    accepted: Mapping[tuple[str, str], Record],
    merged: Counter[tuple[str, str]],
    proof: Proof,
) -> None:
    part = record["part"]
    if record["round"] != closed[part]:
        proof.problems.append(f"round {record['round']} of {part} was closed after {closed[part]} rounds")
    closed[part] += 1
    proof.left_out += len(record.get("left_out", ()))
    for name in (*record["updates"], *record.get("left_out", ())):
        if (part, name) not in accepted:
            proof.problems.append(f"round {record['round']} of {part} merged {name}, which was not accepted before")
        merged[part, name] += 1


def _check_versions(records: Sequence[Record], directory: Path, proof: Proof) -> None:
    """The last version of each part has the digest that its merge was logged with."""
    last = {record["part"]: record for record in records if record["kind"] == "closed"}
    for part, record in last.items():
        path = directory / "versions" / part / f"{record['round'] + 1}.safetensors"
        try:
            found = tensors_digest(load_file(path))
        except (OSError, SafetensorError) as error:
            proof.problems.append(f"the last version of {part} cannot be read: {error}")
            continue
        if found != record["sha256"]:
            proof.problems.append(f"the last version of {part} is not what its merge was logged with")
