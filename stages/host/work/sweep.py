"""A sweep: a chunk of noisy slots on its way through the host's blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from stages.backends.base import CleanPiece, Denoised
from stages.backends.sweep import BlockWork, Boundary, SweepPlan
from stages.errors import CodecError
from stages.host.parts import ModelSource
from stages.host.sessions import HostSession
from stages.host.work.base import KernelCall, TextWork, check_extent, check_reads, parse_symbols
from stages.host.work.sampling import plain_sampling
from stages.limits import MAX_STEPS
from stages.model.codec import StateCodec, codec_named
from stages.model.samplers import SAMPLERS, Ode
from stages.model.scoring import MAX_LOGITS
from stages.v1 import stage_pb2
from stages.wire.status import invalid


@dataclass(eq=False, kw_only=True)
class SweepWork(TextWork):
    """A chunk of noisy slots on its way through the host's blocks."""

    plan: SweepPlan
    codec: StateCodec
    before: Tensor | None  # E, (slots, code_dim); none before block 0

    def begin(self, session: HostSession, following: int) -> None:
        super().begin(session, following)
        self._left = deque(session.caches)
        self._enter(self.before)

    @property
    def rows(self) -> int:
        return self._block.rows

    def next_op(self) -> KernelCall:
        runner, piece = self.session.parts.runners["chain"][self._block.index], self._block.piece
        return KernelCall(runner.read if isinstance(piece, CleanPiece) else runner.denoise, piece, self.rows)

    def complete(self, result: Tensor | Denoised) -> None:
        self._block.supply(result)
        if not self._block.done:
            return
        outcome = self._block.outcome()
        if isinstance(outcome, bytes):
            self.outcome = stage_pb2.Event(session=self.hop.session, number=self.number, text=outcome)
        elif self._left:
            self._enter(outcome)
        else:
            self.outcome, sweep = self.hop, self.hop.sweep
            sweep.block, sweep.estimate = self.following, outcome.estimate

    def _enter(self, before: Tensor | Boundary | None) -> None:
        source, index = self.session.parts.plan.models["chain"], self._left.popleft()
        architecture, partition = source.manifest.own_architecture, source.manifest.partition
        assert partition is not None
        caches = self.session.caches[index]
        self._block = BlockWork(
            architecture, index, partition, caches, self.plan, self.codec, self.clean, before, self.reads
        )


def parse_sweep(hop: stage_pb2.Hop, source: ModelSource) -> SweepWork:
    """Raises StatusError."""
    sweep = hop.sweep
    a = source.manifest.own_architecture
    clean = parse_symbols(sweep.clean, source.alphabet)
    known, start = len(clean), sweep.start + len(clean)
    check_extent(hop.capacity, sweep.start, known, a.positions)
    if sweep.reads and sweep.start:
        raise invalid("only a sweep that opens a session can be a replay of reads")
    check_reads(sweep.reads, known)
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
            before = Boundary(sweep.estimate).decode(a, codec, sweep.slots)
    except CodecError as error:
        raise invalid(str(error)) from None
    if first and sweep.estimate:
        raise invalid("block 0 starts from noise: its message carries no estimate")
    denoising = SweepPlan(seed, start, sweep.slots, sweep.steps, temperature, sampler)
    return SweepWork(
        hop=hop,
        kind="chain",
        number=sweep.number,
        start=sweep.start,
        clean=clean,
        reads=tuple(sweep.reads),
        plan=denoising,
        codec=codec,
        before=before,
    )
