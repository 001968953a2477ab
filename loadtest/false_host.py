"""A host that computes wrongly: `python -m loadtest.false_host stage ...`, with the options of `onesweep stage`.

What it says has the right shape and size and passes every check; only computing it again tells.
"""

from __future__ import annotations

import sys

from serving.cli import main
from stages.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from stages.engine import Job
from stages.hop import Outcome
from stages.host import Host
from stages.server import StageServer
from stages.v1 import stage_pb2


class FalseHost(Host):
    """A host whose every number stands in its neighbour's place."""

    def _go_on(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, stage_pb2.Event):
            if outcome.WhichOneof("outcome") == "text":
                alphabet = job.session.alphabet
                outcome.text = alphabet.encode([(symbol + 1) % 128 for symbol in alphabet.symbols(outcome.text)])
        elif outcome.WhichOneof("work") == "sweep":
            sweep = outcome.sweep
            sweep.estimate = turned(sweep.estimate, codec_named(sweep.codec), sweep.slots)
        else:
            step = outcome.step
            count = job.session.alphabet.count
            rows = count(step.clean) + sum(count(candidate) - 1 for candidate in step.candidates)
            step.hidden = turned(step.hidden, hidden_codec(step.codec), rows)
        super()._go_on(job, outcome)


def turned(payload: bytes, codec: StateCodec, rows: int) -> bytes:
    """Every row of a payload, turned by one place."""
    matrix = codec.decode(payload, rows, codec.dim(len(payload), rows), FEATURE_LIMIT)
    return codec.encode(matrix.roll(1, dims=1))


if __name__ == "__main__":
    StageServer.host_type = FalseHost
    sys.exit(main())
