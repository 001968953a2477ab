"""Checks every field of a message before a tensor is built from it or a session touched."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import grpc
import numpy as np

from stages.alphabet import Alphabet
from stages.codec import ESTIMATE_LIMIT, FEATURE_LIMIT, codec_named, hidden_codec
from stages.errors import CodecError
from stages.guesses import MAX_TREE, in_order, places
from stages.parts import HostPlan, ModelSource
from stages.pieces import PIECE_FIELDS, room_for
from stages.randomness import MAX_SEED
from stages.refusal import Refusal, failed_precondition, invalid
from stages.samplers import SAMPLERS
from stages.scoring import MAX_CANDIDATES, MAX_LOGITS, most_scored
from stages.sessions import Kind
from stages.sweep import FEATURES
from stages.traces import parse_traceparent
from stages.transport import MAX_NAME
from stages.v1 import stage_pb2
from stages.verdict import MAX_SET

MAX_STEPS = 64
MAX_TEMPERATURE = 100.0
MAX_PASSAGES = 64
MAX_PASSAGE_MS = 1e11
MAX_PASSAGE_BYTES = 1 << 40
"""No more, so that sums of them over all sweeps of a request stay in their fields."""
MAX_NUMBER = 1 << 62
"""Of a sweep or step; those that follow have larger ones."""
MAX_ADDRESS = 256


def check_hop(hop: stage_pb2.Hop, plan: HostPlan) -> Kind:
    """Raise Refusal unless `hop` is a hop that a host with `plan` can do; returns the model that it needs."""
    work = hop.WhichOneof("work")
    if work is None:
        raise invalid("the message carries no work: neither a sweep nor a step")
    check_label(hop.router, "router")
    check_label(hop.session, "session")
    check_passages(hop.passages)
    _check_path(hop)
    _check_names(hop)
    kind, source = _model(hop, plan, ("chain",) if work == "sweep" else ("ar", "scorer"))
    number = hop.sweep.number if kind == "chain" else hop.step.number
    if number > MAX_NUMBER:
        raise invalid(f"sweep {number} of a session; the largest number is {MAX_NUMBER}")
    if kind == "chain":
        _check_sweep(hop, plan, source)
    else:
        _check_step(hop, plan, source)
    if hop.deadline_unix_ms <= time.time() * 1000:
        raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
    return kind


def check_label(text: str, what: str) -> None:
    """Raise Refusal unless `text` can name a router or session."""
    if not 0 < len(text) <= MAX_NAME or not text.isascii() or not text.isprintable():
        raise invalid(f"{what} must be 1 to {MAX_NAME} printable ASCII characters")


def _check_path(hop: stage_pb2.Hop) -> None:
    if len(hop.path) > MAX_PASSAGES:
        raise invalid(f"a path of {len(hop.path)} hosts; a sweep passes at most {MAX_PASSAGES}")
    for address in hop.path:
        if not 0 < len(address) <= MAX_ADDRESS or not address.isascii() or not address.isprintable():
            raise invalid(f"an address on the path must be 1 to {MAX_ADDRESS} printable ASCII characters")
    if hop.place >= max(len(hop.path), 1):
        raise invalid(f"place {hop.place} on a path of {len(hop.path)} hosts")


def _check_reads(work: stage_pb2.Sweep | stage_pb2.Step, start: int, clean: int, fresh: int) -> None:
    """`clean`: new symbols; `fresh`: those of them that were never read before, whatever else was."""
    if not work.reads:
        return
    if start and isinstance(work, stage_pb2.Sweep):
        raise invalid("only a sweep that opens a session can be a replay of reads")
    if not all(work.reads) or sum(work.reads) > clean - fresh:
        raise invalid(f"reads of {sum(work.reads)} symbols, some maybe empty, do not fit {clean} clean ones")


def check_passages(passages: Sequence[stage_pb2.Passage]) -> None:
    """Raise Refusal unless `passages` are an account that can be added up."""
    if len(passages) > MAX_PASSAGES:
        raise invalid(f"{len(passages)} passages; a sweep passes at most {MAX_PASSAGES} hosts")
    for passage in passages:
        check_label(passage.host, "a passage's host")
        if not all(0 <= ms <= MAX_PASSAGE_MS for ms in (passage.queue_ms, passage.compute_ms)):
            raise invalid(f"the passage of {passage.host} has times that are negative, not finite or of years")
        if passage.received_bytes > MAX_PASSAGE_BYTES:
            raise invalid(f"the passage of {passage.host} has a message of {passage.received_bytes} bytes")


def _check_names(hop: stage_pb2.Hop) -> None:
    """What logs and traces call the work: it ends up in both."""
    if hop.request:
        check_label(hop.request, "request")
    if hop.traceparent and parse_traceparent(hop.traceparent) is None:
        raise invalid("traceparent must be a W3C trace context of version 00, or empty")


def _model(hop: stage_pb2.Hop, plan: HostPlan, kinds: Sequence[Kind]) -> tuple[Kind, ModelSource]:
    """Which of the models that can do such work a hop is for, by its digest: the first, where two have the same."""
    held = {kind: source for kind in kinds if (source := plan.model(kind)) is not None}
    for kind, source in held.items():
        if source.digest == hop.digest:
            return kind, source
    if not held:
        lacking = " and ".join(f"{kind}/" for kind in kinds)
        raise failed_precondition(f"this host has no {kinds[0]} model; its checkpoint directory lacks {lacking}")
    shown = ", ".join(f"{source.digest[:12]} ({kind})" for kind, source in held.items())
    raise failed_precondition(
        f"the request is for the checkpoint {hop.digest[:12] or '(none)'}, this host has {shown}: "
        "give every host the same checkpoint"
    )


def _check_sweep(hop: stage_pb2.Hop, plan: HostPlan, source: ModelSource) -> None:
    sweep, a = hop.sweep, source.manifest.chain_architecture
    _check_part(sweep.block, plan, "block")
    clean = _count(sweep.clean, source.alphabet)
    start = sweep.clean_start + clean
    _check_extent(hop.capacity, sweep.clean_start, clean, a.positions)
    _check_reads(sweep, sweep.clean_start, clean, 0)
    if not (clean if a.hands_on_slots else start):
        raise invalid("a sweep needs at least one known symbol before its slots")
    if sweep.slots < 1 or start + sweep.slots > a.positions:
        raise invalid(f"{sweep.slots} slots after {start} symbols do not fit the context of {a.positions}")
    if sweep.slots * a.vocabulary > MAX_LOGITS:
        most = MAX_LOGITS // a.vocabulary
        raise invalid(f"{sweep.slots} slots in a sweep; with {a.vocabulary} symbols there are at most {most}")
    if not 1 <= sweep.steps <= MAX_STEPS:
        raise invalid(f"steps must be 1 to {MAX_STEPS}, not {sweep.steps}")
    _check_sampling(sweep.sampling)
    if sweep.sampler and sweep.sampler not in SAMPLERS:
        raise invalid(f"unknown sampler {sweep.sampler[:40]!r}; choose from {', '.join(SAMPLERS)}")
    first = sweep.block == 0
    chained, grafted = (each and not first for each in (a.context == "chained", a.hands_on_slots))
    try:
        codec = codec_named(sweep.codec)
        if not first:
            codec.decode(sweep.estimate, sweep.slots, a.code_dim, ESTIMATE_LIMIT)
        if chained:
            FEATURES.decode(sweep.features, clean, a.width, FEATURE_LIMIT)
        if grafted:
            FEATURES.decode(sweep.slot_features, sweep.slots, a.width, FEATURE_LIMIT)
    except CodecError as error:
        raise invalid(str(error)) from None
    if first and sweep.estimate:
        raise invalid("block 0 starts from noise: its message carries no estimate")
    if not chained and sweep.features:
        raise invalid("this block reads symbols: its message carries no features")
    if not grafted and sweep.slot_features:
        raise invalid("this block reads states of slots alone: its message carries no features of theirs")


def _check_step(hop: stage_pb2.Hop, plan: HostPlan, source: ModelSource) -> None:
    step, a = hop.step, source.manifest.architecture
    _check_part(step.stage, plan, "stage")
    clean = _count(step.clean, source.alphabet)
    if not clean:
        raise invalid("an AR step needs at least one new symbol")
    extent = _check_tree(step, clean)
    _check_extent(hop.capacity, step.start, extent, a.positions)
    _check_reads(step, step.start, clean, step.draft)
    _check_piece(step, clean, a.positions)
    judged = bool(step.draws and step.draft)  # nothing is asked about what follows the guesses
    if not 1 <= step.remaining <= a.positions - step.start - extent + judged:
        raise invalid(f"{step.remaining} symbols to generate do not fit the context of {a.positions}")
    if step.draft and (step.remaining > 1 or step.draft >= clean):
        raise invalid(f"{step.draft} guesses among {clean} new symbols: give one known symbol, and one step")
    if (step.draft + 1) * a.vocabulary > MAX_LOGITS:
        raise invalid(
            f"{step.draft} guesses; with {a.vocabulary} symbols there are at most {MAX_LOGITS // a.vocabulary - 1}"
        )
    _check_draws(step)
    branch_rows = _check_candidates(step, step.start + clean, source)
    _check_sampling(step.sampling)
    if step.stage == 0 and step.hidden:
        raise invalid("stage 0 reads symbols: its message carries no hidden states")
    try:
        codec = hidden_codec(step.codec)
        if step.stage > 0:
            codec.decode(step.hidden, clean + branch_rows, a.width, FEATURE_LIMIT)
    except CodecError as error:
        raise invalid(str(error)) from None


def _check_piece(step: stage_pb2.Step, clean: int, positions: int) -> None:
    """Of a step that may come in several hops. `clean`: new symbols in this one."""
    if clean > room_for(positions):
        raise invalid(f"{clean} new symbols in one hop; at most {room_for(positions)}: send the step in pieces")
    extra = {field.name for field, _ in step.ListFields()} - PIECE_FIELDS if step.more else set()
    if extra or (step.more and step.remaining > 1):
        raise invalid("more of this step follows: known symbols may come in pieces, all else comes with the last one")
    if step.at_once and not step.more:
        raise invalid("what is read at once is a piece that more of its step follows")


def _count(symbols: bytes, alphabet: Alphabet) -> int:
    """How many there are, every one of them in `alphabet`. Raises Refusal."""
    try:
        return len(alphabet.decode(symbols))
    except CodecError as error:
        raise invalid(str(error)) from None


def _check_tree(step: stage_pb2.Step, clean: int) -> int:
    """How many positions the new symbols take: those of a tree's branches take the same ones."""
    if not step.depths:
        return clean
    if len(step.depths) != step.draft or step.draws:
        raise invalid(f"{len(step.depths)} depths for {step.draft} guesses: a tree takes one for each, and no verdict")
    if step.draft > MAX_TREE:
        raise invalid(f"a tree of {step.draft} guesses; there are at most {MAX_TREE}")
    if not in_order(step.depths):
        raise invalid("the depths of a tree must begin with 0, and each be at most one more than the one before")
    return places(clean, step.depths)


def _check_draws(step: stage_pb2.Step) -> None:
    if not step.draws:
        if step.odds:
            raise invalid("odds of guesses are for a verdict: say which set of draws it is to bring")
        return
    if step.draws > MAX_SET:
        raise invalid(f"set {step.draws} of draws; there are {MAX_SET}, and the last tells all odds")
    if step.remaining > 1 or step.candidates:
        raise invalid("a verdict takes a step of its own: remaining must be 1, and there are no candidates")
    if len(step.odds) != 4 * step.draft:
        raise invalid(f"odds of {len(step.odds)} bytes for {step.draft} guesses: each guess takes one float32")
    odds = np.frombuffer(step.odds, dtype="<f4")
    if not np.all((odds > 0) & (odds <= 1)):  # false for NaN too
        raise invalid("odds must be above 0 and at most 1: what the drafter gave each guess that it drew")


def _check_candidates(step: stage_pb2.Step, end: int, source: ModelSource) -> int:
    """Rows that the candidates take: each symbol but their last. `end`: where they begin."""
    count = len(step.candidates)
    if not count:
        return 0
    alphabet, a = source.alphabet, source.manifest.architecture
    length, most = alphabet.count(step.candidates[0]), most_scored(a.width)
    if count > MAX_CANDIDATES:
        raise invalid(f"{count} candidates; a step scores at most {MAX_CANDIDATES}")
    if step.remaining > 1 or step.draft:
        raise invalid("candidates are scored in a step of their own: remaining must be 1, and draft 0")
    if not length or any(len(candidate) != len(step.candidates[0]) for candidate in step.candidates):
        raise invalid("candidates must have one length, of at least one symbol")
    if count * length > most:
        raise invalid(f"{count} candidates of {length} symbols; a step scores at most {most} in all of width {a.width}")
    if end + length > a.positions:
        raise invalid(f"candidates of {length} symbols after {end} do not fit the context of {a.positions}")
    _count(b"".join(step.candidates), alphabet)
    return count * (length - 1)


def _check_part(part: int, plan: HostPlan, noun: str) -> None:
    if part != plan.blocks[0]:
        held = ",".join(map(str, plan.blocks))
        raise failed_precondition(f"{noun} {part} does not start here: this host holds {held}; check the topology")


def _check_extent(capacity: int, start: int, new: int, positions: int) -> None:
    if not 1 <= capacity <= positions:
        raise invalid(f"a session of {capacity} positions does not fit the context of {positions}")
    if start + new > capacity:
        raise invalid(f"{new} symbols at position {start} do not fit the session's {capacity} positions")


def _check_sampling(sampling: stage_pb2.Sampling) -> None:
    if not math.isfinite(sampling.temperature) or not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise invalid(f"temperature must be 0 to {MAX_TEMPERATURE:g}, not {sampling.temperature}")
    assert 0 <= sampling.seed <= MAX_SEED  # the field's type holds it
