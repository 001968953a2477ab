"""What the hosts of a session have read: with it, other hosts can take over where they stopped."""

from __future__ import annotations

from stages.v1 import stage_pb2

Work = stage_pb2.Sweep | stage_pb2.Step
READ_BYTES = 64
"""An AR step's bytes are read as if they came one by one up to so many at once (FEW_POSITIONS in stages/backends)."""


class Journal:
    """Bytes that were read before the work under way, and in which pieces: rounding depends on them, a text may not."""

    def __init__(self) -> None:
        self.text = b""
        self.reads: list[int] = []

    def replay(self, work: Work) -> Work:
        """`work` for hosts that have read nothing yet."""
        if not self.text:
            return work
        clean = self.text + work.clean
        if isinstance(work, stage_pb2.Sweep):
            sweep = stage_pb2.Sweep()
            sweep.CopyFrom(work)
            sweep.clean_start, sweep.clean, sweep.reads[:] = 0, clean, self.reads
            return sweep
        step = stage_pb2.Step()
        step.CopyFrom(work)
        step.start, step.clean = 0, clean
        step.reads[:] = self.reads if work.candidates else self._merged()
        return step

    def add(self, work: Work, start: int) -> None:
        """Book what `work` had the hosts read, once the next work begins at `start`: guesses beyond are forgotten."""
        clean = work.clean[: start - len(self.text)]
        # guesses that came with a prompt were read apart from it (stages/hop.py)
        guesses = work.draft if isinstance(work, stage_pb2.Step) and not self.text else 0
        first = min(len(clean), len(work.clean) - guesses)
        self.text += clean
        self.reads += [piece for piece in (first, len(clean) - first) if piece]

    def advance(self, step: stage_pb2.Step, written: bytes) -> stage_pb2.Step:
        """The step that the hosts are at who went on from `step` by themselves, a byte a step, and wrote `written`."""
        after = stage_pb2.Step()
        after.CopyFrom(step)
        after.number += len(written)
        after.start += len(step.clean) + len(written) - 1
        after.clean = written[-1:]
        after.remaining -= len(written)
        self.add(step, step.start + len(step.clean))
        self.text += written[:-1]
        return after

    def _merged(self) -> list[int]:
        """The prompt as it came, and what came after it in few pieces."""
        first, rest = self.reads[0], len(self.text) - self.reads[0]
        return [first, *[READ_BYTES] * (rest // READ_BYTES), *([rest % READ_BYTES] if rest % READ_BYTES else [])]


def start_of(work: Work) -> int:
    """Position of the first of its new bytes."""
    return work.start if isinstance(work, stage_pb2.Step) else work.clean_start
