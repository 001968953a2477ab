"""The journal of a session's reads: with it, other hosts can take over where they stopped."""

from onesweep.stages.model.vocabulary import BYTES, Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import RingStep, Work, copy_of, draft_of

# An AR step's symbols are read as if they came one by one up to so many at once (FEW_POSITIONS in stages/backends).
READ_BYTES = 64


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
        again = copy_of(work)
        again.start, again.clean = 0, clean
        # caches of the same bytes read in other pieces differ in the last bits, and a near tie could fall otherwise
        again.reads[:] = self.reads if isinstance(work, stage_pb2.Sweep | stage_pb2.Score) else self._merged()
        return again

    def add(self, work: Work, start: int) -> None:
        """Book what `work` had the hosts read, once the next work begins at `start`: guesses beyond are forgotten."""
        count = self.alphabet.count
        clean = self.alphabet.cut(work.clean, 0, start - count(self.text))
        # guesses that came with a prompt were read apart from it (stages/host/work.py)
        drafts = draft_of(work) if not self.text else 0
        first = min(count(clean), count(work.clean) - drafts)
        self.text += clean
        self.reads += [piece for piece in (first, count(clean) - first) if piece]

    def advance(self, step: RingStep, steps: int, written: bytes) -> RingStep:
        """The step that the hosts are at who went on from `step` alone, made so many steps, and wrote `written`."""
        read, count = self.alphabet.count(step.clean), self.alphabet.count(written)
        after = copy_of(step)
        after.number += steps
        after.start += read + count - 1
        after.clean = self.alphabet.cut(written, count - 1)
        if isinstance(after, stage_pb2.Decode):
            after.remaining -= count
        else:
            after.drafting.remaining -= count
        self.add(step, step.start + read)
        self.text += self.alphabet.cut(written, 0, count - 1)
        return after

    def _merged(self) -> list[int]:
        """The prompt as it came, and what came after it in few pieces."""
        first, rest = self.reads[0], self.alphabet.count(self.text) - self.reads[0]
        return [first, *[READ_BYTES] * (rest // READ_BYTES), *([rest % READ_BYTES] if rest % READ_BYTES else [])]
