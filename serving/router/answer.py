"""An audited answer: the work that other hosts repeat, and the results to compare."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.router.host_link import Attempt, HostLink, HostPath
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import PictureMessage, Work, copy_of, merged

# Comparison of two hosts' results, within the differences of honest machines.

# Largest difference of honest numbers, relative to the larger if that exceeds one: the bound that backends must keep
# (stages/backends/runner_checks.py), above their measured differences.
TOLERANCE = 1e-3


def same_result(one: stage_pb2.Event, other: stage_pb2.Event, exact: bool = False) -> bool:
    """True if two sweeps ended with the same text, or the same numbers up to rounding; with `exact`, to the bit."""
    kind = one.WhichOneof("outcome")
    if kind != other.WhichOneof("outcome"):
        return False
    if exact:
        return _outcome_of(one) == _outcome_of(other)
    if kind == "scores":
        mine, theirs = one.scores, other.scores
        return mine.batch == theirs.batch and _close(_floats(mine.nats, "<f8"), _floats(theirs.nats, "<f8"))
    if kind == "pictures":
        drawn, again = (np.frombuffer(event.pictures.pixels, np.uint8).astype(np.int16) for event in (one, other))
        # Honest numbers that differ by TOLERANCE may round to neighbouring shades.
        return drawn.shape == again.shape and np.allclose(drawn, again, rtol=0, atol=1)
    nats, repeated = (_floats(event.logprobs.nats + event.logprobs.top_nats) for event in (one, other))
    return (one.text, one.complete) == (other.text, other.complete) and _close(nats, repeated)


def same_results(mine: Sequence[stage_pb2.Event], theirs: Sequence[stage_pb2.Event], exact: bool = False) -> bool:
    """True if two answers agree sweep by sweep."""
    return len(mine) == len(theirs) and all(same_result(*pair, exact) for pair in zip(mine, theirs, strict=True))


def _outcome_of(event: stage_pb2.Event) -> stage_pb2.Event:
    """An event without the fields that differ from try to try."""
    outcome = copy_of(event)
    for name in ("session", "number", "timings", "drafted"):
        outcome.ClearField(name)
    return outcome


def _floats(payload: bytes, dtype: str = "<f4") -> NDArray[np.float64]:
    size = np.dtype(dtype).itemsize
    return np.frombuffer(payload[: len(payload) // size * size], dtype=dtype).astype(np.float64)


def _close(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> bool:
    return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


# Most new tokens of a drawn text that one hop checks; the least is half of it.
PASS_TOKENS = 128


@dataclass(frozen=True)
class AuditedAnswer:
    """One session's answer, and the work that other hosts repeat."""

    # Hosts that contributed to it, and the path that it ended on.
    hosts: frozenset[HostLink]
    path: HostPath
    works: Sequence[Work | PictureMessage]
    results: Sequence[stage_pb2.Event]
    vocabulary: Vocabulary
    # Makes the hops of some work for hosts that have read nothing yet.
    hops: Callable[[Attempt, Work | PictureMessage], list[stage_pb2.Hop]]
    # Finds a path over hosts with its weights that avoids some addresses; None without one.
    choose: Callable[[Collection[str]], HostPath | None]
    due_at: float
    # Seconds from request to answer.
    took_s: float

    # A teacher-forced pass equals the steps that generated a text, to the last bit: its tokens from `prompt` on are
    # attended one by one (stages/model/prefill.py). It reads each weight once; the steps read it once per token.
    @property
    def in_one_pass(self) -> bool:
        """True for a text that was drawn token by token."""
        first = self.works[0]
        return isinstance(first, stage_pb2.Read) and first.HasField("sample")

    @property
    def by_hosts(self) -> bool:
        """True if the last host drew the text among candidates: hosts start every step after the first themselves."""
        first = self.works[0]
        return isinstance(first, stage_pb2.Read) and first.score.remaining > 0

    def received(self, events: Sequence[stage_pb2.Event], expected: int) -> list[stage_pb2.Event] | None:
        """The results in the events of a step, of which `expected` must arrive; None while some are missing."""
        if not self.by_hosts:
            return [merged(events)] if len(events) == expected else None
        drawn = self.comparable(events)
        return drawn if len(drawn) == len(self.comparable(self.results)) else None

    @property
    def given(self) -> int:
        """Steps that scored tokens of the prompt, before the text."""
        return sum(isinstance(work, stage_pb2.Read) and work.sample.given for work in self.works[: len(self.results)])

    def comparable(self, results: Sequence[stage_pb2.Event]) -> list[stage_pb2.Event]:
        """`results`, with those of a drawn text merged into one, so that its pieces do not matter."""
        if self.by_hosts:  # up to the end of the text; a step without text appears where another host took over
            return [each for each in results if each.text][: sum(bool(each.text) for each in self.results)]
        scored, results = list(results[: self.given]), results[self.given :]
        if not self.in_one_pass or not results:
            return [*scored, *results]
        whole = stage_pb2.Event(text=b"".join(each.text for each in results), complete=results[-1].complete)
        if any(each.HasField("logprobs") for each in results):
            for each in results:
                whole.logprobs.nats += each.logprobs.nats
                whole.logprobs.top_tokens += each.logprobs.top_tokens
                whole.logprobs.top_nats += each.logprobs.top_nats
        return [*scored, whole]

    def steps(self, attempt: Attempt, cut: random.Random) -> list[list[stage_pb2.Hop]]:
        """The hops of each step along an attempt's path, in order.

        :param cut: chooses where a drawn text is cut, so that no two passes over it look alike.
        """
        works = self._passes(cut) if self.in_one_pass else self.works[: len(self.results)]
        return [self.hops(attempt, work) for work in works]

    def _passes(self, cut: random.Random) -> list[Work | PictureMessage]:
        works = list[Work | PictureMessage](self.works[: self.given])
        first, vocabulary = self.works[: len(works) + 1][-1], self.vocabulary
        assert isinstance(first, stage_pb2.Read)
        drawn = b"".join(each.text for each in self.results[len(works) :])
        clean = vocabulary.cut(first.clean, 0, vocabulary.count(first.clean) - first.sample.draft)
        at, start, count = 0, first.start, vocabulary.count(drawn)
        while at < count:
            end = min(at + cut.randint(PASS_TOKENS // 2, PASS_TOKENS), count)
            if count <= PASS_TOKENS:
                end = count
            drafts = vocabulary.cut(drawn, at, end - 1)
            works.append(
                stage_pb2.Read(
                    number=len(works),
                    start=start,
                    clean=clean + drafts,
                    prompt=first.prompt,
                    codec=first.codec,
                    sample=stage_pb2.Sample(sampling=first.sample.sampling, draft=end - 1 - at),
                )
            )
            start += vocabulary.count(clean) + end - 1 - at
            clean, at = vocabulary.cut(drawn, end - 1, end), end
        return works
