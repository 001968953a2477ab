"""Validation: a hop becomes a typed request, its payloads decoded, before a session is touched.

Every field is checked here and nowhere else, and every payload is decoded once: decoding is checking it.
"""

from collections.abc import Sequence

import grpc
from torch import Tensor

from onesweep.stages.backends.sweep import Boundary, SweepPlan
from onesweep.stages.checkpoint.draft_head import has_draft_head
from onesweep.stages.errors import CodecError
from onesweep.stages.host.parts import HostPlan, ModelKind, ModelSource
from onesweep.stages.host.picture_validation import check_drawn, parse_consult, parse_denoise, parse_draw
from onesweep.stages.host.requests import (
    Drafting,
    HopRequest,
    PipelineRequest,
    PrefillRequest,
    SamplingRequest,
    ScoreRequest,
    SweepRequest,
)
from onesweep.stages.host.sampling_validation import (
    parse_grammar,
    parse_logprobs,
    parse_sampling,
    parse_shaping,
    plain_sampling,
)
from onesweep.stages.limits import MAX_ADDRESS, MAX_BRANCHES, MAX_CANDIDATES, MAX_LINK_MS, MAX_STEPS
from onesweep.stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.model.prefill import ATTEND_POSITIONS, max_new_symbols
from onesweep.stages.model.samplers import SAMPLERS, Ode
from onesweep.stages.model.scoring import MAX_LOGITS, most_scored
from onesweep.stages.model.speculation import MAX_DRAFT_TREE, are_depths, tree_positions
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.channel import MAX_NAME
from onesweep.stages.wire.messages import AnyWork, RingStep, StageWork, drafts_itself, has_more, work_of
from onesweep.stages.wire.status import StatusError, failed_precondition, invalid

MAX_TIMINGS = 64
MAX_TIMING_MS = 1e11
MAX_TIMING_BYTES = 1 << 40  # no more, so that sums of them over all sweeps of a request stay in their fields
MAX_NUMBER = 1 << 62  # of a sweep or step; those that follow have larger ones
SPACE_BYTES, DIGEST_BYTES = 16, 32  # of a kept prefix


def parse_hop(hop: stage_pb2.Hop, plan: HostPlan) -> HopRequest:
    """The work of `hop` for a host with `plan`. Raises StatusError unless it is a hop that such a host can do."""
    if hop.WhichOneof("work") is None:
        raise invalid("the message carries no work: neither a sweep nor a step; see that its sender runs this version")
    check_label(hop.router, "router")
    check_label(hop.session, "session")
    check_timings(hop.timings)
    _check_path(hop)
    _check_names(hop)
    work = work_of(hop)
    check_drawn(work, plan)
    kind, source = _model(hop, plan, _kinds(work))
    if work.number > MAX_NUMBER:
        raise invalid(f"sweep {work.number} of a session; the largest number is {MAX_NUMBER}")
    _check_part(work, plan)
    if hop.HasField("memory"):
        _check_memory(hop.memory, work)
    request: HopRequest
    if isinstance(work, stage_pb2.Draw):
        request = parse_draw(work, source)
    elif isinstance(work, stage_pb2.Denoise):
        request = parse_denoise(work, source)
    elif isinstance(work, stage_pb2.Consult):
        request = parse_consult(work, source, hop)
    elif isinstance(work, stage_pb2.Sweep):
        request = _sweep(hop, work, source)
    else:
        request = _pipeline(hop, work, kind, source, plan)
    if not hop.left_s > 0:  # true for NaN too
        raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
    return request


def _kinds(work: AnyWork) -> tuple[ModelKind, ...]:
    """The models that may do such work."""
    if isinstance(work, stage_pb2.Sweep | stage_pb2.Draw):
        return ("chain",)
    if isinstance(work, stage_pb2.Consult):
        return ("experts",)
    return ("steps",) if isinstance(work, stage_pb2.Denoise) else ("ar", "scorer")


# The envelope


def check_label(text: str, what: str) -> None:
    """Raise StatusError unless `text` can name a router or session."""
    if not 0 < len(text) <= MAX_NAME or not text.isascii() or not text.isprintable():
        raise invalid(f"{what} must be 1 to {MAX_NAME} printable ASCII characters")


def check_timings(timings: Sequence[stage_pb2.HopTiming]) -> None:
    """Raise StatusError unless `timings` can be added up."""
    if len(timings) > MAX_TIMINGS:
        raise invalid(f"{len(timings)} timings; a sweep passes at most {MAX_TIMINGS} hosts")
    for timing in timings:
        check_label(timing.host, "a timing's host")
        if not all(0 <= ms <= MAX_TIMING_MS for ms in (timing.queue_ms, timing.compute_ms)):
            raise invalid(f"the timing of {timing.host} has times that are negative, not finite or of years")
        if timing.received_bytes > MAX_TIMING_BYTES:
            raise invalid(f"the timing of {timing.host} has a message of {timing.received_bytes} bytes")


def check_link_delay(delay_ms: int, is_local: bool) -> None:
    """Raise StatusError unless this host may delay what it sends."""
    if delay_ms > MAX_LINK_MS:
        raise invalid(f"a delay of {delay_ms} ms; at most {MAX_LINK_MS} ms can be added to a link")
    # anybody's request could hold up a host that serves others
    if delay_ms and not is_local:
        raise failed_precondition("delay is added to links on one machine only: this host listens on another address")


def _check_path(hop: stage_pb2.Hop) -> None:
    if len(hop.path) > MAX_TIMINGS:
        raise invalid(f"a path of {len(hop.path)} hosts; a sweep passes at most {MAX_TIMINGS}")
    for address in hop.path:
        if not 0 < len(address) <= MAX_ADDRESS or not address.isascii() or not address.isprintable():
            raise invalid(f"an address on the path must be 1 to {MAX_ADDRESS} printable ASCII characters")
    if hop.place >= max(len(hop.path), 1):
        raise invalid(f"place {hop.place} on a path of {len(hop.path)} hosts")


def _check_names(hop: stage_pb2.Hop) -> None:
    """Names end up in logs and traces."""
    if hop.request:
        check_label(hop.request, "request")
    if hop.traceparent:
        check_label(hop.traceparent, "traceparent")


def _check_memory(memory: stage_pb2.Memory, work: AnyWork) -> None:
    if not isinstance(work, StageWork):
        raise invalid("memory is of the texts that a pipeline reads: this hop carries other work")
    if isinstance(work, stage_pb2.Score) and work.batch:
        raise invalid("a later batch of candidates opens no session: its message has no place in memory")
    if len(memory.space) != SPACE_BYTES:
        raise invalid(f"a space in memory has {SPACE_BYTES} bytes, not {len(memory.space)}")
    if not memory.prefix and work.start:
        raise invalid(f"a session opens at 0, or after a kept prefix, not at {work.start}")
    if memory.prefix and (len(memory.prefix) != DIGEST_BYTES or not work.start or work.start % ATTEND_POSITIONS):
        grid = f"a multiple of {ATTEND_POSITIONS}"
        raise invalid(f"a kept prefix has a digest of {DIGEST_BYTES} bytes, and ends at {grid}")


def _model(hop: stage_pb2.Hop, plan: HostPlan, kinds: Sequence[ModelKind]) -> tuple[ModelKind, ModelSource]:
    """The model that a hop is for, by its digest: the first, where two have the same."""
    for kind in kinds:
        source = plan.model(kind)
        if source is not None and source.digest == hop.digest:
            return kind, source
    held = {kind: source for kind in kinds if (source := plan.model(kind)) is not None}
    if not held:
        lacking = " and ".join(f"{kind}/" for kind in kinds)
        raise failed_precondition(f"this host has no {kinds[0]} model; its checkpoint directory lacks {lacking}")
    shown = ", ".join(f"{source.digest[:12]} ({kind})" for kind, source in held.items())
    raise failed_precondition(
        f"the request is for the checkpoint {hop.digest[:12] or '(none)'}, this host has {shown}: "
        "give every host the same checkpoint"
    )


# Sweeps


def _sweep(hop: stage_pb2.Hop, sweep: stage_pb2.Sweep, source: ModelSource) -> SweepRequest:
    a = source.manifest.own_architecture
    clean = _symbols(sweep.clean, source.alphabet)
    known, start = len(clean), sweep.start + len(clean)
    _check_extent(hop.capacity, sweep.start, known, a.positions)
    if sweep.reads and sweep.start:
        raise invalid("only a sweep that opens a session can be a replay of reads")
    _check_reads(sweep.reads, known)
    if not start:
        raise invalid("a sweep needs at least one known symbol before its slots")
    if sweep.slots < 1 or start + sweep.slots > a.positions:
        raise invalid(f"{sweep.slots} slots after {start} symbols do not fit the context of {a.positions}")
    if sweep.slots * a.vocabulary > MAX_LOGITS:
        most = MAX_LOGITS // a.vocabulary
        raise invalid(f"{sweep.slots} slots in a sweep; with {a.vocabulary} symbols there are at most {most}")
    if not 1 <= sweep.steps <= MAX_STEPS:
        raise invalid(f"steps must be 1 to {MAX_STEPS}, not {sweep.steps}")
    seed, temperature = plain_sampling(sweep.sampling, "a sweep")
    sampler = sweep.sampler or Ode.name
    if sampler not in SAMPLERS:
        raise invalid(f"unknown sampler {sampler[:40]!r}; choose from {', '.join(SAMPLERS)}")
    first, before = sweep.block == 0, None
    try:
        codec = codec_named(sweep.codec)
        if not first:
            before = Boundary(sweep.estimate, sweep.features).decode(a, codec, known, sweep.slots)
    except CodecError as error:
        raise invalid(str(error)) from None
    if first and sweep.estimate:
        raise invalid("block 0 starts from noise: its message carries no estimate")
    if sweep.features and (first or a.context != "chained"):
        raise invalid("this block reads symbols: its message carries no features")
    denoising = SweepPlan(seed, start, sweep.slots, sweep.steps, temperature, sampler)
    return SweepRequest("chain", sweep.number, sweep.start, clean, tuple(sweep.reads), denoising, codec, before)


# Pipelines


def _pipeline(
    hop: stage_pb2.Hop, work: StageWork, kind: ModelKind, source: ModelSource, plan: HostPlan
) -> PipelineRequest:
    a = source.manifest.text_architecture
    clean = _symbols(work.clean, source.alphabet)
    count = clean.shape[0]
    if isinstance(work, stage_pb2.Score) and work.batch:
        _check_batch(work)
    elif not count:
        raise invalid("an AR step needs at least one new symbol")
    draft, depths = _drafts(work, count) if isinstance(work, stage_pb2.Verify) else (0, ())
    extent = tree_positions(count, depths)
    _check_extent(hop.capacity, work.start, extent, a.positions)
    reads = () if isinstance(work, RingStep) else work.reads
    _check_reads(reads, count)
    if count > (most := max_new_symbols(a.positions)):
        raise invalid(f"{count} new symbols in one hop; at most {most}: send the step in pieces")
    _check_remaining(work, work.start + extent, a.positions)
    if (draft + 1) * a.vocabulary > MAX_LOGITS:
        raise invalid(
            f"{draft} draft tokens; with {a.vocabulary} symbols there are at most {MAX_LOGITS // a.vocabulary - 1}"
        )
    candidates = _candidates(work, work.start + count, source) if isinstance(work, stage_pb2.Score) else None
    branch_rows = 0 if candidates is None else candidates[:, 1:].numel()
    codec, hidden = _hidden(work, count + branch_rows, a.width)
    known = work.start + count - draft
    if isinstance(work, RingStep) and work.prompt > known:
        raise invalid(f"a prompt of {work.prompt} symbols, where {known} are known")
    at_once = count if isinstance(work, stage_pb2.Score) else min(max(work.prompt - work.start, 0), count)
    begin = kind, work.number, work.start, clean, tuple(reads), codec, hidden, at_once
    if isinstance(work, stage_pb2.Prefill):
        return PrefillRequest(*begin, work.for_drafting)
    if candidates is not None:
        assert isinstance(work, stage_pb2.Score)
        _, temperature = plain_sampling(work.sampling, "a score")
        return ScoreRequest(*begin, temperature, candidates, work.batch, has_more(work))
    assert isinstance(work, stage_pb2.Decode | stage_pb2.Verify)
    seed, temperature = parse_sampling(work.sampling)
    shaping = parse_shaping(work.sampling.shaping, a.vocabulary, known)
    logprobs, grammar = parse_logprobs(work.sampling), parse_grammar(work.sampling, source, known, plan.is_last)
    drafting = _drafting(work, source) if drafts_itself(work) else None
    return SamplingRequest(*begin, seed, temperature, shaping, grammar, logprobs, draft, depths, drafting)


def _drafting(verify: stage_pb2.Verify, source: ModelSource) -> Drafting:
    if not has_draft_head(source.manifest):
        raise failed_precondition("the model has no draft head, with which its last host could draft")
    told = verify.drafting
    if told.most > MAX_DRAFT_TREE or told.branches > MAX_BRANCHES:
        raise invalid(f"a draft has at most {MAX_DRAFT_TREE} tokens and {MAX_BRANCHES} branches")
    return Drafting(told.remaining, told.most, told.branches)


def _drafts(verify: stage_pb2.Verify, clean: int) -> tuple[int, tuple[int, ...]]:
    """Number of the `clean` new symbols that are draft tokens, and the depths of a tree of them."""
    if verify.draft >= clean:
        raise invalid(f"{verify.draft} draft tokens among {clean} new symbols: give one known symbol")
    if not verify.HasField("tree"):
        return verify.draft, ()
    count = len(verify.tree.depths)
    if count != verify.draft:
        raise invalid(f"{count} depths for {verify.draft} draft tokens: a tree takes one for each")
    if count > MAX_DRAFT_TREE:
        raise invalid(f"a tree of {count} draft tokens; there are at most {MAX_DRAFT_TREE}")
    depths = tuple(verify.tree.depths)
    if not are_depths(depths):
        raise invalid("the depths of a tree must begin with 0, and each be at most one more than the one before")
    return verify.draft, depths


def _check_remaining(work: StageWork, end: int, positions: int) -> None:
    """`end`: the position after the new symbols."""
    remaining = work.remaining if isinstance(work, stage_pb2.Decode) else 1
    if drafts_itself(work):
        # those that are drafted already are among the symbols still to write
        deepest = max(work.tree.depths, default=work.draft - 1) + 1
        remaining = work.drafting.remaining - deepest
    if not 1 <= remaining <= positions - end:
        raise invalid(f"{remaining} symbols to generate do not fit the context of {positions}")


def _check_batch(score: stage_pb2.Score) -> None:
    """A batch of candidates after the first."""
    if score.batch >= score.batches:
        raise invalid(f"batch {score.batch} of {score.batches} batches of candidates")
    if score.clean or not score.start:
        raise invalid(f"batch {score.batch} of a step's candidates brings no new symbols, and starts after batch 0")


def _candidates(score: stage_pb2.Score, end: int, source: ModelSource) -> Tensor:
    """The candidates, (candidates, length). `end`: the position where they begin."""
    count, alphabet, a = len(score.candidates), source.alphabet, source.manifest.text_architecture
    if not 1 <= count <= MAX_CANDIDATES:
        raise invalid(f"{count} candidates; a step scores 1 to {MAX_CANDIDATES}")
    if score.batches > MAX_CANDIDATES:
        raise invalid(f"{score.batches} batches of candidates; a step has at most {MAX_CANDIDATES}")
    length, most = alphabet.count(score.candidates[0]), most_scored(a.width)
    if not length or any(len(candidate) != len(score.candidates[0]) for candidate in score.candidates):
        raise invalid("candidates must have one length, of at least one symbol")
    if score.batches > 1 and length == 1:
        raise invalid("candidates of one symbol come in one batch: there is nothing to read after it")
    if count * length > most:
        raise invalid(f"{count} candidates of {length} symbols; a hop has at most {most} in all of width {a.width}")
    if end + length > a.positions:
        raise invalid(f"candidates of {length} symbols after {end} do not fit the context of {a.positions}")
    return _symbols(b"".join(score.candidates), alphabet).view(count, length)


def _hidden(work: StageWork, rows: int, width: int) -> tuple[StateCodec, Tensor | None]:
    """The codec of hidden states, and those of the stage before."""
    try:
        codec = hidden_codec(work.codec)
        if work.stage > 0:
            return codec, codec.decode(work.hidden, rows, width, FEATURE_LIMIT)
    except CodecError as error:
        raise invalid(str(error)) from None
    if work.hidden:
        raise invalid("stage 0 reads symbols: its message carries no hidden states")
    return codec, None


# Fields that several kinds of work have


def _symbols(data: bytes, alphabet: Alphabet) -> Tensor:
    """Symbols of `alphabet`, (symbols,) int64. Raises StatusError."""
    try:
        return alphabet.decode(data)
    except CodecError as error:
        raise invalid(str(error)) from None


def _check_reads(reads: Sequence[int], clean: int) -> None:
    # counted before they are looked at: of 60 MB of them that alone held the event loop for seconds
    if len(reads) > clean or not all(reads) or sum(reads) > clean:
        raise invalid(f"{len(reads)} reads, some maybe empty or long, do not fit {clean} clean symbols")


def _check_part(work: AnyWork, plan: HostPlan) -> None:
    held = ",".join(map(str, plan.blocks))
    if isinstance(work, stage_pb2.Consult):
        if work.HasField("expert") and work.expert not in plan.blocks:
            raise failed_precondition(f"expert {work.expert} is not here: this host holds {held}; check the topology")
        return
    if isinstance(work, stage_pb2.Sweep | stage_pb2.Draw):
        part, noun = work.block, "block"
    else:
        part, noun = work.stage, "stage"
    if part != plan.blocks[0]:
        raise failed_precondition(f"{noun} {part} does not start here: this host holds {held}; check the topology")


def _check_extent(capacity: int, start: int, new: int, positions: int) -> None:
    if not 1 <= capacity <= positions:
        raise invalid(f"a session of {capacity} positions does not fit the context of {positions}")
    if start + new > capacity:
        raise invalid(f"{new} symbols at position {start} do not fit the session's {capacity} positions")
