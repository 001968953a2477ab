"""A lying worker: `python -m loadtest.faults.byzantine_worker --coordinator HOST:PORT --lie flipped`.

It takes a worker's place, waits until it has seen how its part moves, and hands in that movement, made false. A line
of JSON for each update that it handed in goes to its standard output.
"""

import argparse
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.wire.tls import Security
from trainer.rounds.client import FileGoneError, LeaseLostError, RoundsClient
from trainer.rounds.settings import PROTOCOL
from trainer.v1 import rounds_pb2

Row = NDArray[np.float32]
Lie = Callable[[Row, float], Row]  # makes a false update from a direction and the norm of an honest update

TRIES, PATIENCE_S = 60, 120.0


def stretched(direction: Row, norm: float) -> Row:
    """A vector in this direction, of this norm."""
    length = float(np.linalg.norm(direction.astype(np.float64)))
    return (direction * (norm / length) if length else direction).astype(np.float32)


LIES: Mapping[str, Lie] = {
    "nan": lambda direction, norm: np.full_like(direction, np.nan),
    "absurd": lambda direction, norm: stretched(direction, norm) * np.float32(1000.0),
    "scaled": lambda direction, norm: stretched(direction, norm) * np.float32(5.0),
    "flipped": lambda direction, norm: -stretched(direction, norm),
    "kept-back": lambda direction, norm: stretched(direction, norm) * np.float32(-6.0),
}
AT_ONCE = {"kept-back": 3}  # rounds whose updates are handed in together, each as if it had been late


class ByzantineWorker:
    """One place of a run, misused."""

    def __init__(self, client: RoundsClient, options: argparse.Namespace) -> None:
        self.client, self.options = client, options
        self.after: int | None = None
        self.seen: list[tuple[int, Row]] = []  # the last two versions, with their numbers
        self.kept: list[rounds_pb2.Order] = []
        request = rounds_pb2.JoinRequest(
            worker=options.name,
            version=version("onesweep"),
            protocol=PROTOCOL,
            part=options.part,
            data=options.digest,
        )
        self.lease = client.join(request, wait=True).lease

    def work(self) -> int:
        """One turn; returns how many updates were handed in."""
        o = self.options
        answer = self.client.next(rounds_pb2.NextRequest(worker=o.name, lease=self.lease, after=self.after))
        if answer.WhichOneof("next") == "end":
            raise SystemExit(0)
        if answer.WhichOneof("next") != "order":
            return 0
        order = answer.order
        if not self.seen or self.seen[-1][0] != order.base.version:
            self.seen = [*self.seen[-1:], (order.base.version, self._weights(order))]
        self.after = order.round
        if len(self.seen) < 2:
            return 0  # the next order shows how the part moves
        self.kept.append(order)
        if len(self.kept) < AT_ONCE.get(o.lie, 1):
            return 0
        kept, self.kept = self.kept, []
        for order in kept:
            print(json.dumps({"round": order.round, "lie": o.lie, **self._hand_in(order)}), flush=True)
        return len(kept)

    def _weights(self, order: rounds_pb2.Order) -> Row:
        """All tensors in one row: shapes need not be known to lie."""
        (file,) = order.base.files  # whole, for this worker reports that it holds nothing
        with tempfile.TemporaryDirectory() as folder:
            data = self.client.fetch(file, self.options.name, self.lease, Path(folder) / "weights")
        return np.frombuffer(data, "<f4")

    def _hand_in(self, order: rounds_pb2.Order) -> dict[str, Any]:
        (_, before), (_, now) = self.seen
        payload = LIES[self.options.lie](before - now, self.options.norm).astype("<f4").tobytes()
        digest = hashlib.sha256(payload)
        submission = rounds_pb2.Submission(
            worker=self.options.name,
            lease=self.lease,
            id=f"false-{order.round}-{digest.hexdigest()[:16]}",
            round=order.round,
            base_version=order.base.version,
            steps=order.steps,
            sequences=order.steps * self.options.sequences,
            codec="fp32",
            size=len(payload),
            sha256=digest.digest(),
        )
        verdict = self.client.submit(submission, payload)
        outcome = rounds_pb2.Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower()
        return {"id": submission.id, "outcome": outcome, "reason": verdict.reason}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--part", type=int, required=True)
    parser.add_argument("--digest", required=True, help="SHA-256 of the training text")
    parser.add_argument("--lie", choices=LIES, required=True)
    parser.add_argument("--norm", type=float, required=True, help="of an honest update")
    parser.add_argument("--sequences", type=int, required=True, help="of a step")
    parser.add_argument("--count", type=int, default=1, help="updates to hand in")
    options = parser.parse_args()
    client = RoundsClient(options.coordinator, Security(insecure=True), patience_s=PATIENCE_S)
    left, worker = options.count, None
    for _ in itertools.repeat(None, TRIES):
        try:
            worker = worker or ByzantineWorker(client, options)
            left -= worker.work()
            if left <= 0:
                return
        except LeaseLostError:
            worker = None
        except FileGoneError:  # a newer version is there
            continue


if __name__ == "__main__":
    main()
