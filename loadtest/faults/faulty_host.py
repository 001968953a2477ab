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
from onesweep.stages.host.scheduler import ScheduledHop
from onesweep.stages.host.server import StageServer
from onesweep.stages.host.work.pictures import EXACT, PictureWork
from onesweep.stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.pictures.architecture import PictureArchitecture
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import Outcome, hidden_rows, work_of

SPOILS = ("length", "scales", "number", "unparsable")


class GarbageHost(Host):
    """Breaks the protocol with every outcome, in each of SPOILS in turn."""

    _turns = itertools.cycle(SPOILS)

    def _hand_over(self, job: ScheduledHop, outcome: Outcome) -> None:
        # not the step that follows a text: it would be computed from what is none
        told = job.work.result or outcome
        spoil(told, next(self._turns))
        if isinstance(told, stage_pb2.Hop):
            super()._hand_over(job, told)
        else:
            self.subscribers.publish(job.hop.router, told)


class WrongHost(Host):
    """Puts every number in its neighbour's place, in a share of its sweeps."""

    rate, turns = 1.0, random.Random(0)

    def _go_on(self, job: ScheduledHop, outcome: Outcome) -> None:
        if self.turns.random() >= self.rate:
            super()._go_on(job, outcome)
            return
        told, alphabet = job.work.result or outcome, job.session.alphabet
        if isinstance(told, stage_pb2.Event):
            if told.WhichOneof("outcome") == "text":
                told.text = _next_symbols(told.text, alphabet)
                if isinstance(outcome, stage_pb2.Hop):
                    outcome.read.clean = _next_symbols(outcome.read.clean, alphabet)
            elif told.HasField("pictures"):
                told.pictures.pixels = told.pictures.pixels[::-1]
        elif isinstance(job.work, PictureWork):
            source = job.session.parts.plan.models[job.session.kind]
            _turn_pictures(told, job.work, source.manifest.picture_architecture)
        elif told.WhichOneof("work") == "sweep":
            sweep = told.sweep
            sweep.estimate = turned(sweep.estimate, codec_named(sweep.codec), sweep.slots)
        else:
            read = told.read
            rows = hidden_rows(read, job.session.alphabet)
            read.hidden = turned(read.hidden, hidden_codec(read.codec), rows)
        super()._go_on(job, outcome)


def _next_symbols(text: bytes, alphabet: Alphabet) -> bytes:
    return alphabet.encode([(symbol + 1) % 128 for symbol in alphabet.symbols(text)])


HOSTS: dict[str, type[Host]] = {"garbage": GarbageHost, "wrong": WrongHost}


def _turn_pictures(hop: stage_pb2.Hop, work: PictureWork, a: PictureArchitecture) -> None:
    """Turn the rows of what travels of pictures."""
    rows = work.plan.pictures * a.tokens
    if hop.HasField("draw"):
        hop.draw.estimate = turned(hop.draw.estimate, codec_named(hop.draw.codec), rows)
    elif hop.denoise.hidden:
        hidden = work.plan.evaluations * a.tokens
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
