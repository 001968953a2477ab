"""Candidates that the last host writes: hosts score them in one trip, and it draws the text among them.

The last host reads the prompt, lets its drafter write candidates, and sends them to the first host. When they return
with the scores of all hosts, it draws one by weight, and writes candidates that may follow it, up to the text's end.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.backends.whole_model import Continuations, KnownText
from stages.host.parts import Parts
from stages.host.plan import ModelKind, ModelSource
from stages.host.scheduler import KernelCall
from stages.host.sessions import HostSession
from stages.host.work.score import ScoreWork, parse_candidates, score_fields
from stages.limits import MAX_CANDIDATES
from stages.model.prefill import READ_POSITIONS
from stages.model.resampling import weigh
from stages.model.scoring import MAX_LOGITS, Floats, max_scored
from stages.v1 import stage_pb2
from stages.wire.messages import next_score
from stages.wire.status import failed_precondition, internal, invalid


@dataclass(eq=False, kw_only=True)
class ResampleWork(ScoreWork):
    """New tokens, and candidates after them, one of which becomes the text. The first step has no candidates yet."""

    seed: int
    count: int  # candidates in a step
    length: int  # tokens in each candidate, as long as that many remain
    remaining: int  # tokens still to write
    prompt: int  # tokens that were given

    def begin(self, session: HostSession, following: int) -> None:
        self._to_read, self._drawn = deque[KnownText](), b""
        self._writing: Continuations | None = None
        super().begin(session, following)

    def extra_bytes(self, parts: Parts, capacity: int) -> int:
        if not parts.plan.is_last:
            return 0
        drafter = parts.drafter(self.kind)
        if drafter is None or drafter.model is None:
            raise failed_precondition(
                "this host has no drafter: give the host of the last stage the whole bundle, with local/, or use mode "
                "ar"
            )
        if capacity >= drafter.model.positions:
            most = drafter.model.positions
            raise invalid(f"prompt and output need a context of {capacity + 1} tokens, but the drafter has {most}")
        if self.start + len(self.clean) + self.remaining > capacity + 1:  # the last token is written, but never read
            raise invalid(f"{self.remaining} tokens to generate do not fit the session's {capacity} positions")
        return drafter.session_bytes(capacity) + self.count * drafter.model.text_bytes(self.length)

    @property
    def rows(self) -> int:
        if self._to_read:
            return READ_POSITIONS
        return super().rows if self._writing is None else self.count

    def next_op(self) -> KernelCall:
        if self._to_read:
            return KernelCall(self._to_read[0].text.model.read_on, self._to_read[0], self.rows)
        if self._writing is not None:
            return KernelCall(self._writing.text.model.write, self._writing, self.rows)
        return super().next_op()

    def complete(self, result: Any) -> None:  # noqa: ANN401 - a Tensor, or None after what it read or wrote
        if self._to_read:
            self._to_read.popleft()
        elif self._writing is None:
            super().complete(result)
        elif self._writing.is_done:
            written = self.session.written = self._writing.candidates()
            self._writing = None
            self.outcome = next_score(self.hop, self._drawn, self.session.vocabulary, written.texts)

    def _ended(self, hidden: Tensor) -> None:
        if len(self.candidates):
            super()._ended(hidden)
            return
        self.session.last_known = hidden[-1:].clone()  # the candidates follow it
        self.result = stage_pb2.Event(session=self.hop.session, number=self.number, text=b"")
        self._write(b"")

    def _scored(self, nats: Floats) -> None:
        event = stage_pb2.Event(session=self.hop.session, number=self.number)
        written, self.session.written = self.session.written, None
        if written is None or written.texts != list(self.hop.read.score.candidates):
            raise internal("the candidates that returned are not those that this host wrote")
        drafter_nats, length = written.nats.sum(axis=1), self.candidates.shape[1]
        weights = weigh(nats, drafter_nats, length)
        event.text = written.texts[weights.choose(self.seed, self.start + self.positions)]
        event.candidates.nats = nats.astype("<f8").tobytes()
        event.candidates.drafter_nats = drafter_nats.astype("<f8").tobytes()
        if self.remaining > length:
            self.result = event
            self._write(event.text)
        else:
            self.outcome = event

    def _write(self, drawn: bytes) -> None:
        """Let the drafter write candidates after the known tokens and `drawn`."""
        drafter, vocabulary = self._drafter, self.session.vocabulary
        assert drafter is not None
        text = self._draft_state(drafter).text
        assert text is not None
        known = vocabulary.encode(self.session.tokens[: self.start + self.positions])
        left = self.remaining - vocabulary.count(drawn)
        self._drawn = drawn
        self._writing = Continuations(
            text, known + drawn, self.temperature, self.seed, min(self.length, left), self.count
        )
        if not len(self.candidates):
            # all but the last given token at once, and the rest one by one, so that the drafter of a host that takes
            # the text over computes the same to the last bit
            end = max(self.prompt - 1, 1)
            ends = (*range(READ_POSITIONS, end, READ_POSITIONS), end)
            self._to_read.extend(KnownText(text, vocabulary.cut(known, 0, each)) for each in ends)


def parse_resample(hop: stage_pb2.Hop, kind: ModelKind, source: ModelSource) -> ResampleWork:
    """Raises StatusError, or CodecError."""
    read, score, a = hop.read, hop.read.score, source.manifest.text_architecture
    count, most, remaining = score.drafting.branches, score.drafting.most, score.remaining
    known = read.start + source.vocabulary.count(read.clean)
    if not 1 <= count <= min(MAX_CANDIDATES, MAX_LOGITS // a.vocabulary):
        raise invalid(f"candidates must be 1 to {min(MAX_CANDIDATES, MAX_LOGITS // a.vocabulary)} here, not {count}")
    if most < 2 or count * most > max_scored(a.width):
        raise invalid(
            f"{count} candidates of {most} tokens: each needs at least 2, and a hop can have at most "
            f"{max_scored(a.width)} in all at width {a.width}"
        )
    if not 1 <= read.prompt <= known:
        raise invalid(f"the prompt must have 1 to {known} tokens, not {read.prompt}")
    if remaining > a.positions - known:
        raise invalid(f"{remaining} tokens to generate after {known} do not fit the context of {a.positions}")
    if score.batches or score.batch:
        raise invalid("candidates that the last host writes must come in one batch")
    candidates = parse_candidates(hop, source) if score.candidates else torch.empty(0, 1, dtype=torch.int64)
    shape = (count, min(most, remaining))
    if score.candidates and tuple(candidates.shape) != shape:
        raise invalid(f"candidates must have shape {shape}, not {tuple(candidates.shape)}")
    if not read.clean and (not read.start or candidates.shape[1] < 2):
        raise invalid("an AR step needs at least one new token, or candidates of two")
    fields = score_fields(hop, kind, source, candidates)
    if fields["temperature"] == 0:
        raise invalid("candidates need a temperature above 0")
    return ResampleWork(**fields, seed=score.seed, count=count, length=most, remaining=remaining, prompt=read.prompt)
