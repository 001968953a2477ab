"""The journal of a session's reads: with it, other hosts can take over where they stopped.

The symbols of AR steps give the same in any pieces. What a sweep or a score reads does not: caches of the same symbols
read in other pieces differ in the last bits, and a near tie could fall otherwise.
"""

from stages.model.vocabulary import BYTES, Alphabet
from stages.v1 import stage_pb2
from stages.wire.messages import Work, copy_of


class Journal:
    """Symbols read before the work under way, and in which pieces."""

    def __init__(self, alphabet: Alphabet = BYTES) -> None:
        self.alphabet = alphabet
        self.text = b""
        self.reads: list[int] = []

    def replay(self, work: Work) -> Work:
        """`work` for hosts that have read nothing yet."""
        if not self.text:
            return work
        clean = self.text + work.clean
        again = copy_of(work)
        again.start, again.clean = 0, clean
        if isinstance(again, stage_pb2.Sweep) or again.HasField("score"):
            again.reads[:] = self.reads
        return again

    def add(self, work: Work, start: int) -> None:
        """Book what `work` had the hosts read, once the next work begins at `start`: guesses beyond are forgotten."""
        clean = self.alphabet.cut(work.clean, 0, start - self.alphabet.count(self.text))
        self.text += clean
        if clean:
            self.reads.append(self.alphabet.count(clean))

    def advance(self, step: stage_pb2.Read, steps: int, written: bytes) -> stage_pb2.Read:
        """The step that the hosts are at who went on from `step` alone, made so many steps, and wrote `written`."""
        read, count = self.alphabet.count(step.clean), self.alphabet.count(written)
        after = copy_of(step)
        after.number += steps
        after.start += read + count - 1
        after.clean = self.alphabet.cut(written, count - 1)
        after.sample.remaining -= count
        self.add(step, step.start + read)
        self.text += self.alphabet.cut(written, 0, count - 1)
        return after
