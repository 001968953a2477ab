"""The proof, made without the coordinator's own code: nothing that was accepted is lost, nothing counts twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from loadtest.training.witness import Statement, tensors_digest

Record = dict[str, Any]


@dataclass
class Proof:
    """What was compared, and a sentence for each thing that should not be."""

    accepted: int = 0
    merged: int = 0
    heard: int = 0
    """Times that a worker's own log says that an update was taken."""
    compared: int = 0
    """Updates whose tensors were hashed where they were made, and again by the coordinator."""
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
    proof.accepted, proof.merged = len(accepted), sum(merged.values())
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
    for name in record["updates"]:
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
