"""A read: new tokens on their way through the host's stages of a pipeline, and the tokens sampled after them."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.backends.base import CleanPiece
from stages.host.drafter import Drafter, DraftState
from stages.host.grammar import Grammar
from stages.host.plan import HostPlan, ModelKind, ModelSource
from stages.host.scheduler import KernelCall, TextWork
from stages.host.schema_check import NOT_FOLLOWED
from stages.host.sessions import HostSession
from stages.host.work.checks import SamplingPlan, check_extent, check_reads, parse_sampling
from stages.limits import MAX_BRANCHES
from stages.model.codec import FEATURE_LIMIT, StateCodec, hidden_codec
from stages.model.draft_tree import MAX_DRAFT_TREE, Draft, are_depths, drafted_after, tree_positions
from stages.model.prefill import max_new_tokens, read_lengths
from stages.model.randomness import sample_tokens
from stages.model.scoring import MAX_LOGITS, log_probabilities, most_likely
from stages.v1 import stage_pb2
from stages.wire.messages import next_read
from stages.wire.status import invalid

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class ReadWork(TextWork):
    """New tokens that the host's stages read. Used by itself, it is the beginning of a long step that continues."""

    codec: StateCodec
    hidden: Tensor | None  # hidden states of the stage before, (rows, width); None before stage 0
    at_once: int  # this many of the first new tokens attend at once; the others compute as they would one by one
    lengths: list[int]  # of the reads that the host splits them into
    depths: tuple[int, ...] = ()  # of each token of the last read, if that ends with a tree of draft tokens
    drafts: bool = False
    compiles: bool = False

    is_step = is_prefill = has_more = True

    def begin(self, session: HostSession, following: int) -> None:
        super().begin(session, following)
        if session.beginning is not None and session.beginning.recalled:
            session.beginning.recall(session.layers, session.tokens)
        for cache in session.layers:
            cache.length = self.start  # forget draft tokens from there on
        end = self.start + self.remembered
        session.tokens[self.start : end] = self.clean[: self.remembered].numpy()
        self._runners, self._stages = session.parts.runners[session.kind], tuple(session.caches)
        self._ends_here = self._stages[-1] == session.parts.plan.parts - 1
        self._unread = self._source()
        self._read = 0  # new tokens in the pieces before this one
        self._at = 0
        self._x = self._unread.popleft()
        self._hidden = list[Tensor]()

    def _source(self) -> deque[Tensor]:
        return deque((self.clean if self.hidden is None else self.hidden).split(self.lengths))

    @property
    def between_reads(self) -> bool:
        return self._at == 0

    @property
    def rows(self) -> int:
        return self._x.shape[0]

    def next_op(self) -> KernelCall:
        stage, rows = self._stages[self._at], self._x.shape[0]
        # the tokens of this read that do not attend at once
        one_by_one = min(max(self._read + rows - self.at_once, 0), rows)
        piece = CleanPiece(self._x, self.session.caches[stage], one_by_one, () if self._unread else self.depths)
        return KernelCall(self._runners[stage].read, piece, rows)

    def complete(self, result: Tensor) -> None:
        self._x, self._at = result, self._at + 1
        if self._at < len(self._stages):
            # round as if sent to another host, so that a text does not depend on which host holds which stage
            self._x = self.codec.round_trip(result.flatten(0, -2), FEATURE_LIMIT).view(result.shape)
            return
        self._hidden.append(self._x.flatten(0, -2))
        if self._unread:
            self._read += self.rows
            self._x, self._at = self._unread.popleft(), 0
            return
        hidden = torch.cat(self._hidden) if len(self._hidden) > 1 else self._hidden[0]
        if self._ends_here:
            self._ended(hidden)
        else:
            read = self.hop.read
            read.stage, read.hidden = self.following, self.codec.encode(hidden)
            self.outcome = self.hop

    def _ended(self, hidden: Tensor) -> None:
        """Finish a read on the host of the last stage. hidden: (rows, width)."""
        if self.drafts and (drafter := self._drafter) is not None:
            with self._without_drafts():
                drafter.read(self._draft_state(drafter), self.session.tokens[: self.start + len(hidden)])
        self.outcome = stage_pb2.Event(session=self.hop.session, number=self.number)

    def _draft_state(self, drafter: Drafter) -> DraftState:
        if self.session.draft is None:
            self.session.draft = drafter.begin(self.session.capacity)
        return self.session.draft

    @contextlib.contextmanager
    def _without_drafts(self) -> Iterator[None]:
        """Guard the drafter: if it fails, the step has no drafts, and the drafter starts afresh with the next step."""
        try:
            yield
        except Exception:
            log.exception("session %s: its drafter failed; the step has no drafts", self.hop.session)
            self.session.draft = None

    @property
    def _drafter(self) -> Drafter | None:
        return self.session.parts.drafter(self.session.kind)


@dataclass(eq=False, kw_only=True)
class SampleWork(ReadWork):
    """New tokens, after which one token is sampled, and one at each draft token among them while the drafts are right.

    Drafts are compared with what the model samples at their position from the same random numbers, so the text is
    exactly the text that it writes without drafts.
    """

    sampling: SamplingPlan
    draft: int  # how many of the last new tokens are draft tokens
    given: bool  # the draft tokens are the given text, and are accepted as they are
    tree: tuple[int, ...]  # depth of each draft token of a tree; empty for a chain
    remaining: int  # tokens still to write if the hosts start the next step; 0 if the router does
    drafting: stage_pb2.Drafting | None  # limits of the last host's drafts; None if it makes none

    is_prefill = has_more = False

    def begin(self, session: HostSession, following: int) -> None:
        super().begin(session, following)
        # here, not when a token is drawn, so that an unreadable tokenizer fails only this hop
        settings = self.sampling.grammar if self._ends_here else None
        if settings is not None and (session.grammar is None or session.grammar.settings != settings):
            session.grammar = Grammar(session.parts.plan.models[session.kind], settings)
        self._grammar = session.grammar if settings is not None else None

    def next_op(self) -> KernelCall:
        if self._at < len(self._stages):
            return super().next_op()
        return KernelCall(self._runners[self._stages[-1]].next_byte, self._x, self.rows)

    def complete(self, result: Tensor) -> None:
        if self._at < len(self._stages):
            super().complete(result)
            return
        event = self._sampled(result)
        self.outcome = event
        if event.WhichOneof("outcome") != "text" or event.complete:
            return
        vocabulary, drafting = self.session.vocabulary, self.drafting
        written = vocabulary.tokens(event.text)
        if drafting is not None:
            event.drafted = self.draft
        if (left := self.remaining - len(written)) < 1:
            return
        draft, kept = (Draft(), 0) if drafting is None else self._drafted(drafting, written, left)
        self.result, self.outcome = event, next_read(self.hop, event.text, vocabulary, kept, draft)

    def _ended(self, hidden: Tensor) -> None:
        # the last known token and the drafts: a single product for all of them reads a large head from memory once,
        # not once per level of the tree
        self._x = hidden[-1 - self.draft :]

    def _sampled(self, logits: Tensor) -> stage_pb2.Event:
        """The event with what was sampled. logits: (rows, vocabulary)."""
        event = stage_pb2.Event(session=self.hop.session, number=self.number)
        plan, grammar = self.sampling, self._grammar
        drafts = self.clean[self.clean.shape[0] - self.draft :].tolist() if self.draft else []
        first, vocabulary = self.start + self.clean.shape[0] - self.draft, self.session.vocabulary
        known, shaping = self.session.tokens[:first], plan.shaping
        # sample only along the accepted drafts
        following = drafted_after(drafts, self.tree or range(len(drafts)))
        text, right = b"", -1
        for position in range(first, first + len(drafts) + 1):
            row = shaping.adjusted(logits[right + 1 : right + 2], known)
            if grammar is not None:
                grammar.read(known[grammar.settings.prompt :].tolist())
                if (masked := grammar.masked(row)) is None:
                    return self._without_token(grammar.problem)
                row = masked
            if self.given and right + 1 < len(drafts):
                token = vocabulary.encode(drafts[right + 1 : right + 2])
            else:
                token = sample_tokens(row, plan.temperature, plan.seed, position, shaping)
            text += token
            if plan.logprobs is not None:
                self._add_logprobs(event.logprobs, logits[right + 1 : right + 2], token, plan.logprobs)
            if shaping.adjusts or grammar is not None:
                known = np.append(known, vocabulary.tokens(token))
            if grammar is not None:
                grammar.read(known[grammar.settings.prompt :].tolist())
                if grammar.complete:
                    event.complete = True
                    break
            if not drafts or (right := following.get((right, vocabulary.tokens(token)[0]), -1)) < 0:
                break
        event.text = text
        return event

    def _drafted(self, limits: stage_pb2.Drafting, written: list[int], left: int) -> tuple[Draft, int]:
        """Draft tokens after the tokens just written, and how many of the previous drafts the hosts keep."""
        known, drafter, grammar = self.clean.shape[0] - self.draft, self._drafter, self._grammar
        draft = Draft(tuple(self.clean[known:].tolist()), self.tree or tuple(range(self.draft)))
        kept = draft.kept(written[:-1])
        if drafter is not None:
            text = np.append(self.session.tokens[: self.start], self.clean[:known].tolist() + written)
            allowed = None if grammar is None else grammar.allowed_after(text[grammar.settings.prompt :])
            with self._without_drafts():
                state = self._draft_state(drafter)
                drafter.learn(state, written)
                return drafter.draft(state, text, left, limits, self.sampling, allowed), kept
        return Draft(), kept

    def draft_ahead(self) -> bool:
        session, draft = self.session, self.session.draft
        # a later hop has begun, so the draft ahead depends on its verification
        if session.released or session.next_number > self.number + 1 or draft is None or draft.ahead is None:
            return False
        with self._without_drafts():
            if draft.ahead.step():
                return True
        return False

    def _without_token(self, problem: str) -> stage_pb2.Event:
        """The fault event if no token can follow: an exception would count as a fault of this host."""
        words = problem or "no token of the model can continue the text"
        fault = stage_pb2.Fault(code=invalid("").number, message=f"{NOT_FOLLOWED}: {words[:300]}")
        return stage_pb2.Event(session=self.hop.session, number=self.number, fault=fault)

    def _add_logprobs(self, logprobs: stage_pb2.Logprobs, row: Tensor, token: bytes, count: int) -> None:
        """Add ln p of a drawn token, and of the `count` most likely ones. row: logits, (1, vocabulary)."""
        # of the model alone, without the request's temperature, penalties and filters
        nats, vocabulary = log_probabilities(row, 1.0)[0], self.session.vocabulary
        top = most_likely(nats, count)
        logprobs.nats += nats[vocabulary.tokens(token)].astype("<f4").tobytes()
        logprobs.top_tokens += vocabulary.encode(top)
        logprobs.top_nats += nats[top].astype("<f4").tobytes()


def parse_read(hop: stage_pb2.Hop, kind: ModelKind, source: ModelSource, plan: HostPlan) -> ReadWork:
    """A read with or without sampling after it. Raises StatusError, or CodecError."""
    read, sample, a = hop.read, hop.read.sample, source.manifest.text_architecture
    clean = source.vocabulary.decode(read.clean)
    count = clean.shape[0]
    if not count:
        raise invalid("an AR step needs at least one new token")
    if sample.draft >= count:
        raise invalid(f"{sample.draft} draft tokens among {count} new tokens: send at least one known token")
    tree = _parse_tree(sample) if sample.HasField("tree") else ()
    positions, remembered = tree_positions(count, tree) if tree else (count, count)
    begun = read_fields(hop, kind, source, clean, count, positions, remembered)
    begun["at_once"] = min(max(read.prompt - read.start, 0), count)
    if not read.HasField("sample"):
        return ReadWork(**begun, lengths=read_lengths(count, read.reads), drafts=read.for_drafting)
    known = read.start + count - sample.draft
    if read.reads:
        raise invalid("a step that samples takes no reads: they would not change its result")
    if read.prompt > known:
        raise invalid(f"the prompt has {read.prompt} tokens, but only {known} are known")
    drafting = _parse_drafting(sample, read.start + positions, a.positions)
    if (sample.draft + 1) * a.vocabulary > MAX_LOGITS:
        most = MAX_LOGITS // a.vocabulary - 1
        raise invalid(f"{sample.draft} draft tokens; with a vocabulary of {a.vocabulary} the limit is {most}")
    lengths = read_lengths(count, tree=len(tree))
    before = lengths[-1] - sample.draft  # clean tokens of the last read
    return SampleWork(
        **begun,
        lengths=lengths,
        depths=(*range(before), *(before + depth for depth in tree)) if tree else (),
        sampling=parse_sampling(sample.sampling, source, known, plan.is_last),
        compiles=plan.is_last and sample.sampling.HasField("grammar"),
        draft=sample.draft,
        given=sample.given,
        tree=tree,
        remaining=sample.remaining,
        drafts=drafting is not None,
        drafting=drafting,
    )


def read_fields(
    hop: stage_pb2.Hop, kind: ModelKind, source: ModelSource, clean: Tensor, rows: int, positions: int, remembered: int
) -> dict[str, Any]:
    """The fields of work that reads the new tokens `clean`. Raises StatusError unless the session and the model have
    room for them, or CodecError.

    :param rows: of hidden states that come with them.
    :param positions: that they take, of which the session keeps those `remembered`."""
    read, a, count = hop.read, source.manifest.text_architecture, len(clean)
    check_extent(hop.capacity, read.start, positions, a.positions)
    if read.reads:
        check_reads(read.reads, count)
    if count > (most := max_new_tokens(a.positions)):
        raise invalid(f"a hop has {count} new tokens; the limit is {most}: send the step in pieces")
    codec, hidden = _parse_hidden(read, rows, a.width)
    found = {"hop": hop, "kind": kind, "number": read.number, "start": read.start, "clean": clean}
    return {**found, "codec": codec, "hidden": hidden, "positions": positions, "remembered": remembered}


def _parse_hidden(read: stage_pb2.Read, rows: int, width: int) -> tuple[StateCodec, Tensor | None]:
    """The codec of hidden states, and the hidden states from the stage before. Raises StatusError, or CodecError."""
    codec = hidden_codec(read.codec)
    if read.stage > 0:
        return codec, codec.decode(read.hidden, rows, width, FEATURE_LIMIT)
    if read.hidden:
        raise invalid("stage 0 reads tokens: its message must carry no hidden states")
    return codec, None


def _parse_tree(sample: stage_pb2.Sample) -> tuple[int, ...]:
    """Depth of each draft token of a tree."""
    depths = len(sample.tree.depths)
    if depths != sample.draft:
        raise invalid(f"{depths} depths for {sample.draft} draft tokens: a tree needs one for each")
    if depths > MAX_DRAFT_TREE:
        raise invalid(f"a tree has {depths} draft tokens; the limit is {MAX_DRAFT_TREE}")
    tree = tuple(sample.tree.depths)
    if not are_depths(tree):
        raise invalid("the depths of a tree must begin with 0 and grow by at most 1 from one to the next")
    return tree


def _parse_drafting(sample: stage_pb2.Sample, end: int, positions: int) -> stage_pb2.Drafting | None:
    """Limits of the last host's drafts, if it makes any. Raises StatusError, also if the positions from the new tokens'
    `end` to `positions` have no room for the tokens to write."""
    limits, remaining = sample.drafting if sample.HasField("drafting") else None, sample.remaining or 1
    if limits is not None:
        if limits.most > MAX_DRAFT_TREE or limits.branches > MAX_BRANCHES:
            raise invalid(f"a draft can have at most {MAX_DRAFT_TREE} tokens and {MAX_BRANCHES} branches")
        # tokens that are already drafted count among the tokens still to write
        remaining = sample.remaining - max(sample.tree.depths, default=sample.draft - 1) - 1
    elif sample.remaining and sample.draft:
        raise invalid("a step must end after draft tokens of the router: hosts continue only after their own")
    if not 1 <= remaining <= positions - end:
        raise invalid(f"{remaining} tokens to generate do not fit the context of {positions}")
    return limits
