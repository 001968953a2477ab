"""Stage servers that spoil their own answers: `python -m onesweep.loadtest.faults.faulty_host garbage stage ...`.

`garbage` breaks the protocol in one way after the other, as the next host or the router must notice. `wrong` keeps to
it: shapes, sizes and ranges are right and only the numbers are not, so that nothing short of an audit can tell;
`wrong:0.01:7` does so in one of a hundred sweeps, drawn with seed 7. What follows the kind are the options of
`onesweep stage`.
"""

import itertools
import os
import random
import sys

from onesweep.serving.cli.__main__ import main
from onesweep.stages.host.host import Host
from onesweep.stages.host.picture_validation import EXACT
from onesweep.stages.host.requests import PictureRequest
from onesweep.stages.host.scheduler import ScheduledHop
from onesweep.stages.host.server import StageServer
from onesweep.stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.pictures.architecture import PictureArchitecture
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import Outcome, StageWork, hidden_rows, work_of

SPOILS = ("length", "scales", "number", "unparsable")


class GarbageHost(Host):
    """Breaks the protocol with every outcome, in each of SPOILS in turn."""

    _turns = itertools.cycle(SPOILS)

    def _hand_over(self, job: ScheduledHop, outcome: Outcome) -> None:
        spoil(outcome, next(self._turns))
        if isinstance(outcome, stage_pb2.Hop):
            super()._hand_over(job, outcome)
        else:
            # not the step that follows: it would be computed from what is no text
            self.subscribers.publish(job.hop.router, outcome)


class WrongHost(Host):
    """Puts every number in its neighbour's place, in a share of its sweeps."""

    rate, turns = 1.0, random.Random(0)

    def _go_on(self, job: ScheduledHop, outcome: Outcome) -> None:
        if self.turns.random() >= self.rate:
            super()._go_on(job, outcome)
            return
        if isinstance(outcome, stage_pb2.Event):
            if outcome.WhichOneof("outcome") == "text":
                alphabet = job.session.alphabet
                outcome.text = alphabet.encode([(symbol + 1) % 128 for symbol in alphabet.symbols(outcome.text)])
            elif outcome.HasField("pictures"):
                outcome.pictures.pixels = outcome.pictures.pixels[::-1]
        elif isinstance(job.request, PictureRequest):
            source = job.session.parts.plan.models[job.session.kind]
            _turn_pictures(outcome, job.request, source.manifest.picture_architecture)
        elif outcome.WhichOneof("work") == "sweep":
            sweep = outcome.sweep
            sweep.estimate = turned(sweep.estimate, codec_named(sweep.codec), sweep.slots)
        else:
            step = work_of(outcome)
            assert isinstance(step, StageWork)
            rows = hidden_rows(step, job.session.alphabet)
            step.hidden = turned(step.hidden, hidden_codec(step.codec), rows)
        super()._go_on(job, outcome)


HOSTS: dict[str, type[Host]] = {"garbage": GarbageHost, "wrong": WrongHost}


def _turn_pictures(hop: stage_pb2.Hop, request: PictureRequest, a: PictureArchitecture) -> None:
    """Turn the rows of what travels of pictures."""
    rows = request.plan.pictures * a.tokens
    if hop.HasField("draw"):
        hop.draw.estimate = turned(hop.draw.estimate, codec_named(hop.draw.codec), rows)
    elif hop.denoise.hidden:
        hidden = request.plan.evaluations * a.tokens
        hop.denoise.hidden = turned(hop.denoise.hidden, hidden_codec(hop.denoise.codec), hidden)
    else:
        hop.denoise.estimate = turned(hop.denoise.estimate, EXACT, rows)


def turned(payload: bytes, codec: StateCodec, rows: int) -> bytes:
    """Every row of a payload, turned by one place."""
    matrix = codec.decode(payload, rows, codec.dim(len(payload), rows), FEATURE_LIMIT)
    return codec.encode(matrix.roll(1, dims=1))


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
    kind, *numbers = sys.argv[1].split(":")
    StageServer.host_type = HOSTS[kind]
    if numbers:
        WrongHost.rate, WrongHost.turns = float(numbers[0]), random.Random(int(numbers[1]))
    sys.exit(main(sys.argv[2:]))
