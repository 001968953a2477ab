"""A sweep: a chunk of noisy slots on its way through the host's blocks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.backends.base import CleanPiece, Denoised, NoisyPiece
from stages.host.plan import ModelSource
from stages.host.scheduler import KernelCall, TextWork
from stages.host.sessions import HostSession
from stages.host.work.checks import check_extent, check_reads, plain_sampling
from stages.limits import MAX_STEPS
from stages.model.architecture import Architecture
from stages.model.codec import ESTIMATE_LIMIT, StateCodec, codec_named
from stages.model.layers import LayerCache
from stages.model.partition import NoisePartition
from stages.model.prefill import split_reads
from stages.model.randomness import sample_tokens
from stages.model.samplers import SAMPLERS, Ode, step_sigmas
from stages.model.scoring import MAX_LOGITS
from stages.v1 import stage_pb2
from stages.wire.status import invalid


@dataclass(frozen=True)
class SweepPlan:
    """Settings that every block must share to denoise the same chunk."""

    seed: int
    start: int  # position of the first noisy slot: the number of clean tokens before the chunk
    slots: int
    steps: int  # Euler steps in each block
    temperature: float
    sampler: str = "ode"  # a name in SAMPLERS


class BlockWork:
    """One block's work on one chunk: reads the new clean tokens, then denoises, piece by piece.

    Take `piece`, compute it with a BlockRunner, and hand the result to `supply`, until `done` is true.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        partition: NoisePartition,
        caches: list[LayerCache],
        plan: SweepPlan,
        codec: StateCodec,
        clean: Tensor,
        before: Tensor | bytes | None,
        reads: Sequence[int] = (),
    ) -> None:
        """clean: the new tokens, (positions,) int64.

        :param before: E from the block before, (slots, code_dim), or encoded E; None for block 0. Raises CodecError.
        :param reads: lengths of a replay's reads, see `split_reads`.
        """
        a = self.architecture = architecture
        self.index, self.caches, self.plan, self.codec = index, caches, plan, codec
        self.is_last = index == a.parts - 1
        if isinstance(before, bytes):
            before = codec.decode(before, plan.slots, a.code_dim, ESTIMATE_LIMIT)
        self._unread = deque(split_reads(clean, reads))
        self._sampler = SAMPLERS[plan.sampler](
            plan.seed, plan.start, plan.slots, a.code_dim, partition.sigma_max, plan.temperature
        )
        self._evaluation = index * plan.steps
        self._estimate = torch.zeros(plan.slots, a.code_dim) if before is None else before
        high, low = partition.range(index)
        self._levels: deque[tuple[float, float | None]] = deque(pairwise(step_sigmas(high, low, plan.steps)))
        if self.is_last:
            # Evaluate once more at sigma_min, where the text is read out: the last logits belong to the sigma before
            # it, and one more evaluation settles slots that agree with each other.
            self._levels.append((low, None))
        self._logits = torch.empty(0)

    @property
    def done(self) -> bool:
        return not self._levels

    @property
    def piece(self) -> CleanPiece | NoisyPiece:
        """The next piece to compute. Invalid once `done`."""
        if self._unread:
            return CleanPiece(self._unread[0], self.caches)
        sigma = self._levels[0][0]
        z = self._sampler.state(self._estimate, sigma, self._evaluation)
        temperature = self._sampler.point_temperature
        return NoisyPiece(z, self._estimate, sigma, self.plan.start, self.caches, temperature)

    @property
    def rows(self) -> int:
        """Positions in `piece`."""
        return len(self._unread[0]) if self._unread else self.plan.slots

    def supply(self, result: Tensor | Denoised) -> None:
        """Continue with a runner's result for `piece`."""
        if isinstance(result, Tensor):
            self._unread.popleft()
            return
        sigma, sigma_next = self._levels.popleft()
        if sigma_next is not None:
            self._estimate = self._sampler.advance(self._estimate, result.point, sigma, sigma_next)
        self._evaluation += 1
        self._logits = result.logits

    def outcome(self) -> bytes:
        """E for the next block, encoded, or the chunk's text after the last."""
        plan = self.plan
        if self.is_last:
            return sample_tokens(self._logits, plan.temperature, plan.seed, plan.start)
        # round also if the next block is on this host: it takes a fraction of a millisecond, and the text does not
        # depend on which host has which block
        return self.codec.encode(self._estimate)


@dataclass(eq=False, kw_only=True)
class SweepWork(TextWork):
    """A chunk of noisy slots on its way through the host's blocks."""

    reads: tuple[int, ...]  # in a replay, lengths of the reads that first brought the new tokens
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
        compute = runner.read if isinstance(piece, CleanPiece) else runner.denoise
        return KernelCall(compute, piece, self._block.rows)

    def complete(self, result: Denoised) -> None:
        self._block.supply(result)
        if not self._block.done:
            return
        outcome = self._block.outcome()
        if self._block.is_last:
            self.outcome = stage_pb2.Event(session=self.hop.session, number=self.number, text=outcome)
        elif self._left:
            self._enter(outcome)
        else:
            self.outcome, sweep = self.hop, self.hop.sweep
            sweep.block, sweep.estimate = self.following, outcome

    def _enter(self, before: Tensor | bytes | None) -> None:
        source, index = self.session.parts.plan.models["chain"], self._left.popleft()
        architecture, partition = source.manifest.own_architecture, source.manifest.partition
        assert partition is not None
        caches = self.session.caches[index]
        self._block = BlockWork(
            architecture, index, partition, caches, self.plan, self.codec, self.clean, before, self.reads
        )


def parse_sweep(hop: stage_pb2.Hop, source: ModelSource) -> SweepWork:
    """Raises StatusError, or CodecError."""
    sweep = hop.sweep
    a = source.manifest.own_architecture
    clean = source.vocabulary.decode(sweep.clean)
    known, start = len(clean), sweep.start + len(clean)
    check_extent(hop.capacity, sweep.start, known, a.positions)
    if sweep.reads and sweep.start:
        raise invalid("only a sweep that opens a session can be a replay of reads")
    check_reads(sweep.reads, known)
    if not start:
        raise invalid("a sweep needs at least one known token before its slots")
    if sweep.slots < 1 or start + sweep.slots > a.positions:
        raise invalid(f"{sweep.slots} slots after {start} tokens do not fit the context of {a.positions}")
    if sweep.slots * a.vocabulary > MAX_LOGITS:
        most = MAX_LOGITS // a.vocabulary
        raise invalid(f"{sweep.slots} slots in a sweep; with a vocabulary of {a.vocabulary} the limit is {most}")
    if not 1 <= sweep.steps <= MAX_STEPS:
        raise invalid(f"steps must be 1 to {MAX_STEPS}, not {sweep.steps}")
    seed, temperature = plain_sampling(sweep.sampling, "a sweep")
    sampler = sweep.sampler or Ode.name
    if sampler not in SAMPLERS:
        raise invalid(f"unknown sampler {sampler[:40]!r}; choose from {', '.join(SAMPLERS)}")
    codec, before = codec_named(sweep.codec), None
    if sweep.block:
        before = codec.decode(sweep.estimate, sweep.slots, a.code_dim, ESTIMATE_LIMIT)
    elif sweep.estimate:
        raise invalid("block 0 starts from noise: its message must carry no estimate")
    denoising = SweepPlan(seed, start, sweep.slots, sweep.steps, temperature, sampler)
    return SweepWork(
        hop=hop,
        kind="chain",
        number=sweep.number,
        start=sweep.start,
        clean=clean,
        positions=known,
        remembered=known,
        reads=tuple(sweep.reads),
        plan=denoising,
        codec=codec,
        before=before,
    )
