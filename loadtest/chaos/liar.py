"""A host that answers nonsense: `python -m loadtest.chaos.liar stage ...`, with the options of `onesweep stage`.

It computes, then spoils what leaves it, one way after the other. What it cannot be caught at is not among them: bytes
and numbers of the right shape and size that are merely wrong: audits are for these (loadtest/false_host.py).
"""

from __future__ import annotations

import itertools
import os
import sys

from serving.cli import main
from stages.engine import Job
from stages.hop import Outcome
from stages.host import Host
from stages.server import StageServer
from stages.v1 import stage_pb2

LIES = ("length", "scales", "number", "unparsable")


class LyingHost(Host):
    """A host whose every outcome is spoiled."""

    _turns = itertools.cycle(LIES)

    def _hand_over(self, job: Job, outcome: Outcome) -> None:
        spoil(outcome, next(self._turns))
        if isinstance(outcome, stage_pb2.Hop):
            super()._hand_over(job, outcome)
        else:
            self.subscribers.publish(job.hop.router, outcome)


def spoil(outcome: Outcome, lie: str) -> None:
    """Spoil what a host says, in a way that it can be caught at."""
    if lie == "number":
        _work_of(outcome).number += 7
    elif isinstance(outcome, stage_pb2.Hop):
        _spoil_states(outcome, lie)
    else:
        _spoil_result(outcome, lie)


def _work_of(outcome: Outcome) -> stage_pb2.Event | stage_pb2.Sweep | stage_pb2.Step:
    if isinstance(outcome, stage_pb2.Event):
        return outcome
    return outcome.sweep if outcome.WhichOneof("work") == "sweep" else outcome.step


def _spoil_states(hop: stage_pb2.Hop, lie: str) -> None:
    sweep = hop.WhichOneof("work") == "sweep"
    states = hop.sweep.estimate if sweep else hop.step.hidden
    spoiled = {
        "length": states[:-1],
        "scales": b"\xff" * len(states),  # scales, or numbers, that are NaN
        "unparsable": os.urandom(len(states) // 2 + 1),
    }[lie]
    if sweep:
        hop.sweep.estimate = spoiled
    else:
        hop.step.hidden = spoiled


def _spoil_result(event: stage_pb2.Event, lie: str) -> None:
    match event.WhichOneof("outcome"):
        case "text":
            event.text = {"length": event.text * 64, "scales": b"", "unparsable": os.urandom(4096)}[lie]
        case "scores":
            nats = event.scores.nats
            event.scores.nats = {"length": nats[:-1], "scales": b"\xff" * len(nats), "unparsable": b"?"}[lie]
        case "verdict":
            odds = event.verdict.odds
            event.verdict.odds = {"length": odds[:-4], "scales": b"\xff" * len(odds), "unparsable": b"?"}[lie]


if __name__ == "__main__":
    StageServer.host_type = LyingHost
    sys.exit(main())
