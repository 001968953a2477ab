"""A score: new tokens, and the probabilities of candidates that continue them, each a branch that no cache keeps."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.backends.base import BranchPiece
from stages.host.plan import ModelKind, ModelSource
from stages.host.scheduler import KernelCall
from stages.host.sessions import HostSession
from stages.host.work.checks import check_temperature
from stages.host.work.read import ReadWork, read_fields
from stages.limits import MAX_CANDIDATES
from stages.model.prefill import read_lengths
from stages.model.scoring import CandidateScores, Floats, branch_pieces, head_pieces, max_scored
from stages.v1 import stage_pb2
from stages.wire.status import invalid


@dataclass(eq=False, kw_only=True)
class ScoreWork(ReadWork):
    """New tokens, and candidates that may come after them.

    The new tokens are read and remembered; then every candidate is evaluated as a branch. Later batches of candidates
    bring no tokens: they follow the tokens read with the first batch.
    """

    temperature: float
    candidates: Tensor  # (candidates, length) int64
    batch: int
    has_more: bool  # more batches of the step follow

    is_step = is_prefill = False

    def begin(self, session: HostSession, following: int) -> None:
        inner = self.candidates[:, :-1]  # no probabilities are needed after the last token
        if self.hidden is not None:
            width = self.hidden.shape[1]
            self.hidden, inner = self.hidden[: self.positions], self.hidden[self.positions :].view(*inner.shape, width)
        self._branches = branch_pieces(inner)
        self._scores, self._heads = CandidateScores(self.candidates, self.temperature), deque[Tensor]()
        super().begin(session, following)

    def _source(self) -> deque[Tensor]:
        return deque([*(super()._source() if self.positions else ()), *self._branches])

    @property
    def _branching(self) -> bool:
        """True if the piece is of candidates: they follow all new tokens."""
        return self._read >= self.positions

    @property
    def rows(self) -> int:
        if self._heads:
            return self._heads[0].shape[0]
        return self._x.shape[0] * self._x.shape[1] if self._branching else self._x.shape[0]

    def next_op(self) -> KernelCall:
        if self._heads:
            return KernelCall(self._runners[self._stages[-1]].next_byte, self._heads[0], self.rows)
        if not self._branching:
            return super().next_op()
        stage = self._stages[self._at]
        return KernelCall(self._runners[stage].branch, BranchPiece(self._x, self.session.caches[stage]), self.rows)

    def complete(self, result: Tensor) -> None:
        if not self._heads:
            super().complete(result)
            return
        self._heads.popleft()
        self._scores.add(result)
        if not self._heads:
            self._scored(self._scores.nats())

    def _ended(self, hidden: Tensor) -> None:
        self._heads.extend(head_pieces(self._asked(hidden), self.session.vocabulary.size))

    def _scored(self, nats: Floats) -> None:
        """All candidates are scored. nats: ln p of each, (candidates,)."""
        scores = stage_pb2.Scores(nats=nats.astype("<f8").tobytes(), batch=self.batch)
        self.outcome = stage_pb2.Event(session=self.hop.session, number=self.number, scores=scores)

    def _asked(self, hidden: Tensor) -> Tensor:
        """Hidden states before each token of a candidate: the last known token's first."""
        if self.positions:
            hidden = hidden[self.positions - 1 :]
            self.session.last_known = hidden[:1].clone() if self.has_more else None
            return hidden
        assert self.session.last_known is not None
        return torch.cat([self.session.last_known, hidden])


def parse_score(hop: stage_pb2.Hop, kind: ModelKind, source: ModelSource) -> ScoreWork:
    """Raises StatusError, or CodecError."""
    read, score = hop.read, hop.read.score
    if score.batch:
        if score.batch >= score.batches:
            raise invalid(f"batch {score.batch} does not exist: the step has {score.batches} batches of candidates")
        if read.clean or not read.start:
            raise invalid(f"batch {score.batch} of a step's candidates must bring no new tokens and follow batch 0")
    elif not read.clean:
        raise invalid("an AR step needs at least one new token")
    return ScoreWork(**score_fields(hop, kind, source, parse_candidates(hop, source)))


def score_fields(hop: stage_pb2.Hop, kind: ModelKind, source: ModelSource, candidates: Tensor) -> dict[str, Any]:
    """The fields of a ScoreWork, its message checked. Raises StatusError, or CodecError.

    :param candidates: (candidates, length) int64."""
    read, clean = hop.read, source.vocabulary.decode(hop.read.clean)
    count = len(clean)
    return {
        **read_fields(hop, kind, source, clean, count + candidates[:, 1:].numel(), count, count),
        "lengths": read_lengths(count, read.reads),
        "at_once": count,
        "temperature": check_temperature(read.score.temperature),
        "candidates": candidates,
        "batch": read.score.batch,
        "has_more": read.score.batch + 1 < read.score.batches,
    }


def parse_candidates(hop: stage_pb2.Hop, source: ModelSource) -> Tensor:
    """The candidates, (candidates, length) int64. Raises StatusError, or CodecError."""
    score, vocabulary, a = hop.read.score, source.vocabulary, source.manifest.text_architecture
    count, end = len(score.candidates), hop.read.start + vocabulary.count(hop.read.clean)
    if not 1 <= count <= MAX_CANDIDATES:
        raise invalid(f"a step can score 1 to {MAX_CANDIDATES} candidates, not {count}")
    if score.batches > MAX_CANDIDATES:
        raise invalid(f"a step has {score.batches} batches of candidates; the limit is {MAX_CANDIDATES}")
    length, most = vocabulary.count(score.candidates[0]), max_scored(a.width)
    if not length or any(len(candidate) != len(score.candidates[0]) for candidate in score.candidates):
        raise invalid("candidates must have the same length, of at least one token")
    if score.batches > 1 and length == 1:
        raise invalid("candidates of one token must come in one batch: there is nothing to read after it")
    if count * length > most:
        raise invalid(f"{count} candidates of {length} tokens; a hop can have at most {most} in all at width {a.width}")
    if end + length > a.positions:
        raise invalid(f"candidates of {length} tokens after {end} do not fit the context of {a.positions}")
    return vocabulary.decode(b"".join(score.candidates)).view(count, length)
