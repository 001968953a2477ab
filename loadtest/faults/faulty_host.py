"""A stage server that spoils its own answers: `python -m loadtest.faults.faulty_host stage ...`.

It breaks the protocol in one way after the other, as the next host or the router must notice.
"""

import itertools
import os
import sys

from serving.cli.__main__ import main
from stages.host.host import Host
from stages.host.scheduler import ScheduledHop
from stages.host.server import StageServer
from stages.v1 import stage_pb2
from stages.wire.messages import Outcome, work_of

SPOILS = ("length", "scales", "number", "unparsable")


class GarbageHost(Host):
    """Breaks the protocol with every outcome, in each of SPOILS in turn."""

    _turns = itertools.cycle(SPOILS)

    def _go_on(self, job: ScheduledHop, outcome: Outcome) -> None:
        # not the step that follows a text: it would be computed from what is none
        told = job.work.result or outcome
        spoil(told, next(self._turns))
        if isinstance(told, stage_pb2.Hop):
            super()._go_on(job, told)
        else:
            self.subscribers.publish(job.hop.router, told)


def spoil(outcome: Outcome, way: str) -> None:
    """Break a host's outcome in one of SPOILS."""
    if way == "number":
        numbered = outcome if isinstance(outcome, stage_pb2.Event) else work_of(outcome)
        numbered.number += 7
    elif isinstance(outcome, stage_pb2.Hop):
        work = work_of(outcome)
        # what sweeps and pictures carry between noise ranges, or else what travels within a net
        name = "hidden" if getattr(work, "hidden", b"") else "estimate"
        states = getattr(work, name)
        spoiled = {
            "length": states[:-1],
            "scales": b"\xff" * len(states),  # NaN, in scales or in numbers
            "unparsable": os.urandom(len(states) // 2 + 1),
        }
        setattr(work, name, spoiled[way])
    else:
        _spoil_event(outcome, way)


def _spoil_event(event: stage_pb2.Event, way: str) -> None:
    match event.WhichOneof("outcome"):
        case "text":
            event.text = {"length": event.text * 64, "scales": b"", "unparsable": os.urandom(4096)}[way]
        case "scores":
            nats = event.scores.nats
            event.scores.nats = {"length": nats[:-1], "scales": b"\xff" * len(nats), "unparsable": b"?"}[way]
        case "pictures":
            pixels = event.pictures.pixels
            event.pictures.pixels = {"length": pixels[:-1], "scales": b"", "unparsable": os.urandom(4096)}[way]


if __name__ == "__main__":
    StageServer.host_type = GarbageHost
    sys.exit(main(sys.argv[1:]))
