"""A hop's way through this host's parts: what it needs computed next, and what follows from it.

The one place that ties the wire to the model. A hop says what piece of work it has, the engine has the pieces of many
hops computed together, and the hop goes on from the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.alphabet import Alphabet
from stages.backends.base import BranchPiece, CleanPiece, Denoised, NoisyPiece
from stages.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from stages.guesses import GuessTree
from stages.parts import Parts
from stages.pieces import lengths_of
from stages.randomness import sample_symbols
from stages.samplers import Ode
from stages.scoring import CandidateScores, branch_pieces, head_pieces
from stages.sessions import Session
from stages.sweep import BlockWork, Boundary, SweepPlan
from stages.v1 import stage_pb2
from stages.verdict import judge

Outcome = stage_pb2.Hop | stage_pb2.Event
"""Work for the next host, or text for the router; an event without an outcome where more of the step follows."""


@dataclass(frozen=True)
class Demand:
    """A piece of work for the backend."""

    compute: Callable[[Sequence[Any]], Sequence[Any]]
    """The method of a runner that takes such pieces: equal ones can be computed in one call."""
    piece: CleanPiece | BranchPiece | NoisyPiece | Tensor
    rows: int


class HopWork(ABC):
    """One hop on this host."""

    outcome: Outcome | None = None
    """What follows, once everything is computed."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Positions in the next demand."""

    @abstractmethod
    def demand(self) -> Demand:
        """What is to be computed next; only while there is no outcome."""

    @abstractmethod
    def supply(self, result: Tensor | Denoised) -> None:
        """Go on with the result of the last demand."""


def work_on(hop: stage_pb2.Hop, session: Session, parts: Parts, following: int) -> HopWork:
    """The work of an admitted hop. `following`: the block or stage after this host's."""
    if hop.WhichOneof("work") == "sweep":
        return SweepWork(hop, session, parts, following)
    if hop.step.candidates:
        return ScoreWork(hop, session, parts, following)
    return StepWork(hop, session, parts, following)


class SweepWork(HopWork):
    """A chunk of noisy slots on its way through the host's blocks."""

    def __init__(self, hop: stage_pb2.Hop, session: Session, parts: Parts, following: int) -> None:
        sweep = hop.sweep
        self.hop, self.session, self.parts, self.following = hop, session, parts, following
        start = sweep.clean_start + session.alphabet.count(sweep.clean)
        seed, temperature, sampler = sweep.sampling.seed, sweep.sampling.temperature, sweep.sampler or Ode.name
        self.plan = SweepPlan(seed, start, sweep.slots, sweep.steps, temperature, sampler)
        self._left = deque(session.caches)
        self._begin(Boundary(sweep.estimate, sweep.features, sweep.slot_features) if sweep.block else None)

    @property
    def rows(self) -> int:
        return self._block.rows

    def demand(self) -> Demand:
        runner, piece = self.parts.chain[self._block.index], self._block.piece
        return Demand(runner.read if isinstance(piece, CleanPiece) else runner.denoise, piece, self.rows)

    def supply(self, result: Tensor | Denoised) -> None:
        self._block.supply(result)
        if not self._block.done:
            return
        outcome = self._block.outcome()
        if isinstance(outcome, bytes):
            self.outcome = stage_pb2.Event(session=self.hop.session, number=self.hop.sweep.number, text=outcome)
        elif self._left:
            self._begin(outcome)
        else:
            self.outcome = after = stage_pb2.Hop()
            after.CopyFrom(self.hop)
            after.sweep.block = self.following
            after.sweep.estimate, after.sweep.features = outcome.estimate, outcome.features
            after.sweep.slot_features = outcome.slots

    def _begin(self, before: Boundary | None) -> None:
        sweep, source = self.hop.sweep, self.parts.chain_source
        assert source is not None
        assert source.manifest.partition is not None
        index, codec = self._left.popleft(), codec_named(sweep.codec)
        caches, architecture = self.session.caches[index], source.manifest.chain_architecture
        self._block = BlockWork(
            architecture,
            index,
            source.manifest.partition,
            caches,
            self.plan,
            codec,
            sweep.clean,
            before,
            sweep.reads,
        )


class StepWork(HopWork):
    """New symbols on their way through the host's stages of a pipeline."""

    def __init__(self, hop: stage_pb2.Hop, session: Session, parts: Parts, following: int) -> None:
        step = hop.step
        self.hop, self.session, self.parts, self.following = hop, session, parts, following
        _go_back(session, step.start)
        self.codec, self._runners = hidden_codec(step.codec), parts.pipeline(session.kind)
        self._stages, self._alphabet = tuple(session.caches), session.alphabet
        clean = self._alphabet.decode(step.clean)
        self._guesses, self._first = clean[len(clean) - step.draft :].tolist(), step.start + len(clean) - step.draft
        source = clean
        if step.stage > 0:
            source = self.codec.decode(step.hidden, len(clean), parts.width(session.kind), FEATURE_LIMIT)
        self._unread = deque(source.split(lengths_of(step, len(source))))
        before = len(self._unread[-1]) - step.draft
        self._depths = (*range(before), *(before + depth for depth in step.depths)) if step.depths else ()
        self._x, self._at, self._hidden = self._unread.popleft(), 0, list[Tensor]()

    @property
    def between_pieces(self) -> bool:
        """Whether the next piece would start at the host's first stage."""
        return self._at == 0

    @property
    def rows(self) -> int:
        return len(self._x)

    def demand(self) -> Demand:
        if self._at == len(self._stages):
            return Demand(self._runners[self._stages[-1]].next_byte, self._x, self.rows)
        stage = self._stages[self._at]
        depths = () if self._unread else self._depths
        piece = CleanPiece(self._x, self.session.caches[stage], self.hop.step.at_once, depths)
        return Demand(self._runners[stage].read, piece, self.rows)

    def supply(self, result: Tensor | Denoised) -> None:
        assert isinstance(result, Tensor)
        if self._at == len(self._stages):
            self.outcome = self._judged(result) if self.hop.step.draws else self._sampled(result)
            return
        self._x, self._at = result, self._at + 1
        if self._at < len(self._stages):
            self._x = _handed_on(self._x, self.codec)
            return
        self._hidden.append(self._x)
        if self._unread:
            self._x, self._at = self._unread.popleft(), 0
            return
        hidden = torch.cat(self._hidden) if len(self._hidden) > 1 else self._x
        if self._stages[-1] == self.parts.parts - 1:
            self._x = self._asked(hidden)
            if self.hop.step.more:
                self.outcome = stage_pb2.Event(session=self.hop.session, number=self.hop.step.number)
        else:
            self.outcome = after = stage_pb2.Hop()
            after.CopyFrom(self.hop)
            after.step.stage = self.following
            after.step.hidden = self.codec.encode(hidden)

    def _sampled(self, logits: Tensor) -> stage_pb2.Event:
        """The guesses that are right, and the symbol that follows them. logits: (1 + guesses, vocabulary).

        Guesses are compared with what the model samples at their place from the same random numbers, so the text is
        the very text that it writes without guesses. Only along the right ones anything is sampled.
        """
        step, text, right = self.hop.step, b"", -1
        guesses = GuessTree(self._guesses, step.depths or range(step.draft))
        for position in range(self._first, self._first + step.draft + 1):
            row = logits[right + 1 : right + 2]
            symbol = sample_symbols(row, step.sampling.temperature, step.sampling.seed, position)
            text, right = text + symbol, guesses.after(right, self._alphabet.symbols(symbol)[0])
            if right < 0:
                break
        return stage_pb2.Event(session=self.hop.session, number=step.number, text=text)

    def _judged(self, logits: Tensor) -> stage_pb2.Event:
        """How far the guesses are accepted, and what may come then."""
        step, sampling = self.hop.step, self.hop.step.sampling
        odds, place = np.frombuffer(step.odds, dtype="<f4"), (sampling.temperature, sampling.seed, self._first)
        verdict = judge(logits, self._guesses, odds, *place, step.draws)
        whole = len(verdict.symbols) == self._alphabet.size
        told = stage_pb2.Verdict(
            accepted=verdict.accepted,
            odds=verdict.odds.astype("<f4").tobytes(),
            symbols=b"" if whole else self._alphabet.encode(verdict.symbols),
        )
        return stage_pb2.Event(session=self.hop.session, number=step.number, verdict=told)

    def _asked(self, hidden: Tensor) -> Tensor:
        """The rows of which it is asked what follows them: the last known one, and guesses, of which in a verdict the
        last one is asked for nothing more."""
        step = self.hop.step
        rows = hidden[-1 - step.draft :]
        return rows[:-1] if step.draws and step.draft else rows


class ScoreWork(HopWork):
    """New symbols, and candidates that may come after them, on their way through the host's stages of a pipeline.

    The new symbols are read and remembered; then every candidate is evaluated as a branch that nothing remembers.
    """

    def __init__(self, hop: stage_pb2.Hop, session: Session, parts: Parts, following: int) -> None:
        step = hop.step
        self.hop, self.session, self.parts, self.following = hop, session, parts, following
        _go_back(session, step.start)
        self.codec, self._runners = hidden_codec(step.codec), parts.pipeline(session.kind)
        self._stages, self._alphabet = tuple(session.caches), session.alphabet
        candidates = self._alphabet.decode(b"".join(step.candidates)).view(len(step.candidates), -1)
        clean, inner = self._alphabet.decode(step.clean), candidates[:, :-1]  # nothing is asked after a last symbol
        self._known, self._scores = len(clean), CandidateScores(candidates, step.sampling.temperature)
        if step.stage > 0:
            width, known = parts.width(session.kind), self._known
            rows = self.codec.decode(step.hidden, known + inner.numel(), width, FEATURE_LIMIT)
            clean, inner = rows[:known], rows[known:].view(*inner.shape, width)
        self._unread, self._branches = deque(clean.split(lengths_of(step, len(clean)))), deque(branch_pieces(inner))
        self._x, self._at, self._branching = self._unread.popleft(), 0, False
        self._hidden = list[Tensor]()
        self._heads = deque[Tensor]()

    @property
    def rows(self) -> int:
        if self._heads:
            return len(self._heads[0])
        return self._x.shape[0] * self._x.shape[1] if self._branching else len(self._x)

    def demand(self) -> Demand:
        if self._heads:
            return Demand(self._runners[self._stages[-1]].next_byte, self._heads[0], self.rows)
        stage = self._stages[self._at]
        runner, caches = self._runners[stage], self.session.caches[stage]
        if self._branching:
            return Demand(runner.branch, BranchPiece(self._x, caches), self.rows)
        return Demand(runner.read, CleanPiece(self._x, caches, at_once=True), self.rows)

    def supply(self, result: Tensor | Denoised) -> None:
        assert isinstance(result, Tensor)
        if self._heads:
            self._heads.popleft()
            self._scores.add(result)
            if not self._heads:
                self.outcome = self._scored()
            return
        self._x, self._at = result, self._at + 1
        if self._at < len(self._stages):
            self._x = _handed_on(self._x, self.codec)
            return
        self._hidden.append(self._x.flatten(0, -2))
        self._at, self._branching = 0, not self._unread
        left = self._unread or self._branches
        if left:
            self._x = left.popleft()
        else:
            self._go_on(torch.cat(self._hidden))

    def _go_on(self, hidden: Tensor) -> None:
        if self._stages[-1] == self.parts.parts - 1:
            self._heads.extend(head_pieces(hidden[self._known - 1 :], self._alphabet.size))
        else:
            self.outcome = after = stage_pb2.Hop()
            after.CopyFrom(self.hop)
            after.step.stage = self.following
            after.step.hidden = self.codec.encode(hidden)

    def _scored(self) -> stage_pb2.Event:
        scores = stage_pb2.Scores(nats=self._scores.nats().astype("<f4").tobytes())
        return stage_pb2.Event(session=self.hop.session, number=self.hop.step.number, scores=scores)


def _handed_on(hidden: Tensor, codec: StateCodec) -> Tensor:
    """What a stage sees of the one before on the same host: what it would see on another, so that a text does not
    depend on who holds what. hidden: (..., width)."""
    return codec.round_trip(hidden.flatten(0, -2), FEATURE_LIMIT).view(hidden.shape)


def _go_back(session: Session, start: int) -> None:
    """Forget what was read from `start` on: guesses."""
    for caches in session.caches.values():
        for cache in caches:
            cache.length = start


def next_step(hop: stage_pb2.Hop, text: bytes, alphabet: Alphabet) -> stage_pb2.Hop:
    """The AR step that reads the symbol which `hop` ended in."""
    after = stage_pb2.Hop(
        router=hop.router,
        session=hop.session,
        deadline_unix_ms=hop.deadline_unix_ms,
        digest=hop.digest,
        capacity=hop.capacity,
        path=hop.path,
        place=hop.place,
        request=hop.request,
        traceparent=hop.traceparent,
    )
    after.step.number = hop.step.number + 1
    after.step.start = hop.step.start + alphabet.count(hop.step.clean)
    after.step.clean = text
    after.step.remaining = hop.step.remaining - 1
    after.step.sampling.CopyFrom(hop.step.sampling)
    after.step.codec = hop.step.codec
    return after
