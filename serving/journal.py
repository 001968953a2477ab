"""What the hosts of a session have read: with it, other hosts can take over where they stopped."""

from __future__ import annotations

from stages.alphabet import BYTES, Alphabet
from stages.v1 import stage_pb2

Work = stage_pb2.Sweep | stage_pb2.Step
READ_BYTES = 64
"""An AR step's symbols are read as if they came one by one up to so many at once (FEW_POSITIONS in stages/backends)."""


class Journal:
    """Symbols read before the work under way, and in which pieces: rounding depends on them, a text may not."""

    def __init__(self, alphabet: Alphabet = BYTES) -> None:
        self.alphabet = alphabet
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
        count = self.alphabet.count
        clean = self.alphabet.cut(work.clean, 0, start - count(self.text))
        # guesses that came with a prompt were read apart from it (stages/hop.py)
        guesses = work.draft if isinstance(work, stage_pb2.Step) and not self.text else 0
        first = min(count(clean), count(work.clean) - guesses)
        self.text += clean
        self.reads += [piece for piece in (first, count(clean) - first) if piece]

    def advance(self, step: stage_pb2.Step, written: bytes) -> stage_pb2.Step:
        """The step that the hosts are at who went on from `step` alone, a symbol a step, and wrote `written`."""
        read, count = self.alphabet.count(step.clean), self.alphabet.count(written)
        after = stage_pb2.Step()
        after.CopyFrom(step)
        after.number += count
        after.start += read + count - 1
        after.clean = self.alphabet.cut(written, count - 1)
        after.remaining -= count
        self.add(step, step.start + read)
        self.text += self.alphabet.cut(written, 0, count - 1)
        return after

    def _merged(self) -> list[int]:
        """The prompt as it came, and what came after it in few pieces."""
        first, rest = self.reads[0], self.alphabet.count(self.text) - self.reads[0]
        return [first, *[READ_BYTES] * (rest // READ_BYTES), *([rest % READ_BYTES] if rest % READ_BYTES else [])]


def start_of(work: Work) -> int:
    """Position of the first of its new bytes."""
    return work.start if isinstance(work, stage_pb2.Step) else work.clean_start
