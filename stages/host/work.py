"""A hop's way through this host's parts: the kernel calls that it needs, and the outcome that follows from them.

The one place that ties the wire to the model. The scheduler has the next calls of many hops computed together, and
each hop continues from its result.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from onesweep.stages.backends.base import BranchPiece, CleanPiece, Denoised
from onesweep.stages.backends.sweep import BlockInput, BlockWork, Boundary
from onesweep.stages.host.drafter import HeadDrafter, Law
from onesweep.stages.host.grammar import Grammar
from onesweep.stages.host.hop_work import HopWork, KernelCall
from onesweep.stages.host.picture_work import ConsultWork, DenoiseWork, DrawWork
from onesweep.stages.host.requests import (
    ConsultRequest,
    DenoiseRequest,
    DrawRequest,
    HopRequest,
    PipelineRequest,
    PrefillRequest,
    SamplingRequest,
    ScoreRequest,
    SweepRequest,
)
from onesweep.stages.host.schema_check import NOT_FOLLOWED
from onesweep.stages.host.sessions import Session
from onesweep.stages.model.codec import FEATURE_LIMIT
from onesweep.stages.model.draft_tree import Draft
from onesweep.stages.model.randomness import sample_symbols
from onesweep.stages.model.scoring import CandidateScores, branch_pieces, head_pieces, likeliest, log_probabilities
from onesweep.stages.model.speculation import DraftTree
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import StageWork, next_verify, work_of
from onesweep.stages.wire.status import invalid

log = logging.getLogger(__name__)


def begin_work(request: HopRequest, hop: stage_pb2.Hop, session: Session, following: int) -> HopWork:
    """The work of a validated hop.

    :param hop: the message that brought it; it is changed in place.
    :param following: the block or stage after this host's.
    """
    if isinstance(request, DrawRequest):
        return DrawWork(request, hop, session, following)
    if isinstance(request, DenoiseRequest):
        return DenoiseWork(request, hop, session, following)
    if isinstance(request, ConsultRequest):
        return ConsultWork(request, hop, session, following)
    if isinstance(request, SweepRequest):
        return SweepWork(request, hop, session, following)
    if isinstance(request, ScoreRequest):
        return ScoreWork(request, hop, session, following)
    assert isinstance(request, PrefillRequest | SamplingRequest)
    return PipelineWork(request, hop, session, following)


class SweepWork(HopWork):
    """A chunk of noisy slots on its way through the host's blocks."""

    def __init__(self, request: SweepRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        self.request, self.hop, self.session, self.following = request, hop, session, following
        self._left = deque(session.caches)
        self._begin(request.before)

    @property
    def rows(self) -> int:
        return self._block.rows

    def next_op(self) -> KernelCall:
        runner, piece = self.session.parts.chain[self._block.index], self._block.piece
        return KernelCall(runner.read if isinstance(piece, CleanPiece) else runner.denoise, piece, self.rows)

    def complete(self, result: Tensor | Denoised) -> None:
        self._block.supply(result)
        if not self._block.done:
            return
        outcome = self._block.outcome()
        if isinstance(outcome, bytes):
            self.outcome = stage_pb2.Event(session=self.hop.session, number=self.request.number, text=outcome)
        elif self._left:
            self._begin(outcome)
        else:
            self.outcome, sweep = self.hop, self.hop.sweep
            sweep.block, sweep.estimate, sweep.features = self.following, outcome.estimate, outcome.features

    def _begin(self, before: BlockInput | Boundary | None) -> None:
        source, request, index = self.session.parts.chain_source, self.request, self._left.popleft()
        assert source is not None
        architecture, partition = source.manifest.own_architecture, source.manifest.partition
        assert partition is not None
        caches = self.session.caches[index]
        self._block = BlockWork(
            architecture, index, partition, caches, request.plan, request.codec, request.clean, before, request.reads
        )


class _StageWork(HopWork):
    """New symbols on their way through the host's stages of a pipeline."""

    def __init__(self, request: PipelineRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        self.hop, self.session, self.following, self.codec = hop, session, following, request.codec
        if session.beginning is not None and session.beginning.recalled:
            session.beginning.recall(session.layers, session.symbols)
        for cache in session.layers:
            cache.length = request.start  # draft tokens from there on are forgotten
        end = request.start + request.remembered
        session.symbols[request.start : end] = request.clean[: request.remembered].numpy()
        self._runners, self._stages = session.parts.pipeline(session.kind), tuple(session.caches)
        self._at = 0
        self._hidden = list[Tensor]()

    def _between_stages(self, hidden: Tensor) -> Tensor:
        """The input of the next stage on this host: as another host would get it, so that a text does not depend on
        which host holds which stage. hidden: (..., width)."""
        return self.codec.round_trip(hidden.flatten(0, -2), FEATURE_LIMIT).view(hidden.shape)

    @property
    def _ends_here(self) -> bool:
        """True if this host holds the last stage."""
        return self._stages[-1] == self.session.parts.parts - 1

    def _hand_on(self, hidden: Tensor) -> None:
        work = work_of(self.hop)
        assert isinstance(work, StageWork)
        work.stage, work.hidden = self.following, self.codec.encode(hidden)
        self.outcome = self.hop


class PipelineWork(_StageWork):
    """New symbols, after which one may be sampled."""

    def __init__(
        self, request: PrefillRequest | SamplingRequest, hop: stage_pb2.Hop, session: Session, following: int
    ) -> None:
        super().__init__(request, hop, session, following)
        self.request = request
        self._unread = deque((request.clean if request.hidden is None else request.hidden).split(request.lengths))
        self._read = 0  # new symbols in the reads before this one
        self._depths: tuple[int, ...] = ()
        if isinstance(request, SamplingRequest) and request.depths:
            before = len(self._unread[-1]) - request.draft
            self._depths = (*range(before), *(before + depth for depth in request.depths))
        self._x = self._unread.popleft()
        self._grammar = self._grammar_of(request) if isinstance(request, SamplingRequest) and self._ends_here else None

    def _grammar_of(self, request: SamplingRequest) -> Grammar | None:
        """The session's, made at its first step. Made here, and not when a symbol is drawn: a tokenizer that cannot be
        read fails this hop alone."""
        session, settings = self.session, request.grammar
        if settings is not None and (session.grammar is None or session.grammar.settings != settings):
            source = session.parts.plan.model(session.kind)
            assert source is not None
            session.grammar = Grammar(source, settings)
        return session.grammar if settings is not None else None

    @property
    def between_reads(self) -> bool:
        """True if the next read would start at the host's first stage."""
        return self._at == 0

    @property
    def rows(self) -> int:
        return self._x.shape[0]

    def next_op(self) -> KernelCall:
        if self._at == len(self._stages):
            return KernelCall(self._runners[self._stages[-1]].next_byte, self._x, self.rows)
        stage = self._stages[self._at]
        one_by_one = self.request.one_by_one(self._read, self.rows)
        depths = () if self._unread else self._depths
        return KernelCall(
            self._runners[stage].read, CleanPiece(self._x, self.session.caches[stage], one_by_one, depths), self.rows
        )

    def complete(self, result: Tensor | Denoised) -> None:
        assert isinstance(result, Tensor)
        if self._at == len(self._stages):
            self._go_on(self._sampled(result))
            return
        self._x, self._at = result, self._at + 1
        if self._at < len(self._stages):
            self._x = self._between_stages(self._x)
            return
        self._hidden.append(self._x)
        if self._unread:
            self._read += self.rows
            self._x, self._at = self._unread.popleft(), 0
            return
        hidden = torch.cat(self._hidden) if len(self._hidden) > 1 else self._x
        if not self._ends_here:
            self._hand_on(hidden)
        elif isinstance(self.request, PrefillRequest):
            if self.request.for_drafting:
                self._read_for_drafts(hidden, self.request.clean.tolist())
            self.outcome = stage_pb2.Event(session=self.hop.session, number=self.request.number)
        else:
            self._states = hidden
            # one product for all draft tokens reads a large head from memory once, not once a level of the tree
            self._x = hidden[-1 - self.request.draft :]  # the last known symbol and the drafts

    def _sampled(self, logits: Tensor) -> stage_pb2.Event:
        """The event with what was sampled. logits: (rows, vocabulary)."""
        request, event = self.request, stage_pb2.Event(session=self.hop.session, number=self.request.number)
        assert isinstance(request, SamplingRequest)
        drafts = request.clean[request.clean.shape[0] - request.draft :].tolist() if request.draft else []
        first, alphabet = request.start + request.clean.shape[0] - request.draft, self.session.alphabet
        shaping, known = request.shaping, self.session.symbols[:first]
        # Drafts are compared with what the model samples at their place from the same random numbers, so the text is
        # the very text that it writes without drafts. Only along the right ones anything is sampled.
        grammar = self._grammar
        tree, text, right = DraftTree(drafts, request.depths or range(len(drafts))), b"", -1
        for position in range(first, first + len(drafts) + 1):
            row = shaping.adjusted(logits[right + 1 : right + 2], known)
            if grammar is not None:
                grammar.read(known[grammar.settings.prompt :].tolist())
                if (masked := grammar.masked(row)) is None:
                    return self._without_symbol(grammar.problem)
                row = masked
            symbol = sample_symbols(row, request.temperature, request.seed, position, shaping)
            text += symbol
            if request.logprobs is not None:
                self._tell(event.logprobs, logits[right + 1 : right + 2], symbol, request.logprobs)
            if shaping.adjusts or grammar is not None:
                known = np.append(known, alphabet.symbols(symbol))
            if grammar is not None:
                grammar.read(known[grammar.settings.prompt :].tolist())
                if grammar.complete:
                    event.complete = True
                    break
            if not drafts or (right := tree.after(right, alphabet.symbols(symbol)[0])) < 0:
                break
        event.text = text
        return event

    def _go_on(self, event: stage_pb2.Event) -> None:
        """Draft what follows and begin the next step, where the last host does; else `event` is all."""
        request, drafter, self.outcome = self.request, self._drafter, event
        assert isinstance(request, SamplingRequest)
        if request.drafting is None or drafter is None or event.WhichOneof("outcome") != "text":
            return
        alphabet, known = self.session.alphabet, request.clean.shape[0] - request.draft
        written = alphabet.symbols(event.text)
        event.drafted, left = request.draft, request.drafting.remaining - len(written)
        if event.complete or left < 1:
            return
        before = request.clean.tolist()
        right = DraftTree(before[known:], request.depths or range(request.draft)).path(written[:-1])
        rows = [*range(known), *(known + at for at in right)]
        self._read_for_drafts(self._states[rows], before[:known] + written)
        draft, state = Draft(), self.session.draft
        text = np.append(self.session.symbols[: request.start], before[:known] + written)
        allowed = None if self._grammar is None else self._grammar.allowed_after(text[self._grammar.settings.prompt :])
        law = Law(request.temperature, request.seed, request.shaping, allowed)
        with self._without_drafts():
            if state is not None:
                drafter.learn(state, written)
                draft = drafter.draft(state, text, left, request.drafting.most, request.drafting.branches, law)
        kept = sum(at == place for place, at in enumerate(right))  # the first branch stands first
        self.result, self.outcome = event, next_verify(self.hop, event.text, kept, draft, alphabet)

    def _read_for_drafts(self, hidden: Tensor, symbols: list[int]) -> None:
        session, drafter, start = self.session, self._drafter, self.request.start
        if drafter is None:
            return
        with self._without_drafts():
            if session.draft is None:
                session.draft = drafter.begin(session.capacity, start)
            drafter.read(session.draft, start, hidden, symbols)

    @contextlib.contextmanager
    def _without_drafts(self) -> Iterator[None]:
        """Guard of the draft head: where it fails, the step has no drafts, and the head begins anew with the next."""
        try:
            yield
        except Exception:
            log.exception("session %s: its draft head failed; the step has no drafts", self.hop.session)
            self.session.draft = None

    @property
    def _drafter(self) -> HeadDrafter | None:
        return self.session.parts.drafter(self.session.kind)

    def _without_symbol(self, problem: str) -> stage_pb2.Event:
        """The event where no symbol can follow: raised, it would fail the hops that were computed with this one."""
        words = problem or "no token of the model can continue a text by it"
        fault = stage_pb2.Fault(code=invalid("").number, message=f"{NOT_FOLLOWED}: {words[:300]}")
        return stage_pb2.Event(session=self.hop.session, number=self.request.number, fault=fault)

    def _tell(self, told: stage_pb2.Logprobs, row: Tensor, symbol: bytes, count: int) -> None:
        """Add ln p of a drawn symbol, and of the `count` most likely ones. row: its logits, (1, vocabulary)."""
        # by the model itself: temperature, penalties and filters are the request's own
        nats, alphabet = log_probabilities(row, 1.0)[0], self.session.alphabet
        top = likeliest(nats, count)
        told.nats += nats[alphabet.symbols(symbol)].astype("<f4").tobytes()
        told.top_symbols += alphabet.encode(top)
        told.top_nats += nats[top].astype("<f4").tobytes()


class ScoreWork(_StageWork):
    """New symbols, and candidates that may come after them.

    The new symbols are read and remembered; then every candidate is evaluated as a branch that nothing remembers. Later
    batches of candidates follow symbols that were read with the first.
    """

    def __init__(self, request: ScoreRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        super().__init__(request, hop, session, following)
        self.request, self._known = request, request.clean.shape[0]
        self._scores = CandidateScores(request.candidates, request.temperature)
        clean, inner = request.clean, request.candidates[:, :-1]  # nothing is asked after a last symbol
        if (hidden := request.hidden) is not None:
            clean, inner = hidden[: self._known], hidden[self._known :].view(*inner.shape, hidden.shape[1])
        self._unread = deque(clean.split(request.lengths) if self._known else ())
        self._branches, self._branching = deque(branch_pieces(inner)), not self._unread
        self._x = (self._unread or self._branches).popleft()
        self._heads = deque[Tensor]()

    @property
    def rows(self) -> int:
        if self._heads:
            return self._heads[0].shape[0]
        return self._x.shape[0] * self._x.shape[1] if self._branching else self._x.shape[0]

    def next_op(self) -> KernelCall:
        if self._heads:
            return KernelCall(self._runners[self._stages[-1]].next_byte, self._heads[0], self.rows)
        stage = self._stages[self._at]
        runner, caches = self._runners[stage], self.session.caches[stage]
        if self._branching:
            return KernelCall(runner.branch, BranchPiece(self._x, caches), self.rows)
        return KernelCall(runner.read, CleanPiece(self._x, caches), self.rows)

    def complete(self, result: Tensor | Denoised) -> None:
        assert isinstance(result, Tensor)
        if self._heads:
            self._heads.popleft()
            self._scores.add(result)
            if not self._heads:
                nats = self._scores.nats().astype("<f8").tobytes()
                scores = stage_pb2.Scores(nats=nats, batch=self.request.batch)
                self.outcome = stage_pb2.Event(session=self.hop.session, number=self.request.number, scores=scores)
            return
        self._x, self._at = result, self._at + 1
        if self._at < len(self._stages):
            self._x = self._between_stages(self._x)
            return
        self._hidden.append(self._x.flatten(0, -2))
        self._at, self._branching = 0, not self._unread
        left = self._unread or self._branches
        if left:
            self._x = left.popleft()
        elif self._ends_here:
            self._heads.extend(head_pieces(self._asked(torch.cat(self._hidden)), self.session.alphabet.size))
        else:
            self._hand_on(torch.cat(self._hidden))

    def _asked(self, hidden: Tensor) -> Tensor:
        """Hidden states after which a symbol of a candidate follows: that of the last known symbol first."""
        if self._known:
            hidden = hidden[self._known - 1 :]
            self.session.last_known = hidden[:1].clone() if self.request.has_more else None
            return hidden
        assert self.session.last_known is not None
        return torch.cat([self.session.last_known, hidden])
