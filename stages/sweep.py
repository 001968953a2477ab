"""One block's part of a sweep: Euler steps over its noise range, an evaluation at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.architecture import Architecture
from stages.backends.base import BlockRunner, CleanPiece, Denoised, NoisyPiece
from stages.codec import ESTIMATE_LIMIT, FEATURE_LIMIT, Int8, StateCodec
from stages.layers import LayerCache
from stages.noise import step_sigmas
from stages.partition import NoisePartition
from stages.randomness import sample_symbols
from stages.samplers import SAMPLERS

FEATURES = Int8()
"""How clean features travel between `chained` blocks."""
PIECE_POSITIONS = 128
"""Clean positions that are read at once: a long prompt is read in pieces, so that it does not hold up others.
Pieces are cut by a sequence's own positions, never by its company."""


@dataclass(frozen=True)
class SweepPlan:
    """What every block must agree on to denoise the same chunk."""

    seed: int
    start: int
    """Position of the first noisy slot: the number of clean bytes before the chunk."""
    slots: int
    steps: int
    """Euler steps in each block."""
    temperature: float
    sampler: str = "ode"
    """A name in SAMPLERS."""


@dataclass(frozen=True)
class Boundary:
    """What passes from one block to the next, encoded: this is what a hop carries."""

    estimate: bytes
    features: bytes
    """Clean features of the positions read in this sweep; empty unless the chain is `chained`."""


class BlockWork:
    """One block's work on one chunk: reads the new clean bytes, then denoises, a piece at a time.

    Ask for `piece`, have a BlockRunner compute it, hand the result to `supply`, until it is `done`.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        partition: NoisePartition,
        caches: list[LayerCache],
        plan: SweepPlan,
        codec: StateCodec,
        clean: bytes,
        before: Boundary | None,
        reads: Sequence[int] = (),
    ) -> None:
        """:param before: what the block before handed over; None for block 0.
        :param reads: of a replay, see `clean_pieces`.

        Raises CodecError.
        """
        a = self.architecture = architecture
        self.index, self.caches, self.plan, self.codec = index, caches, plan, codec
        self.is_last = index == a.parts - 1
        source = clean_source(a, index == 0, clean, before.features if before else b"")
        self._unread = deque(clean_pieces(source, reads))
        self._features: list[Tensor] = []
        self._sampler = SAMPLERS[plan.sampler](
            plan.seed, plan.start, plan.slots, a.code_dim, partition.sigma_max, plan.temperature
        )
        self._evaluation = index * plan.steps
        self._estimate = torch.zeros(plan.slots, a.code_dim)
        if before is not None:
            self._estimate = codec.decode(before.estimate, plan.slots, a.code_dim, ESTIMATE_LIMIT)
        high, low = partition.range(index)
        self._levels: deque[tuple[float, float | None]] = deque(pairwise(step_sigmas(high, low, plan.steps)))
        if self.is_last:
            self._levels.append((low, None))  # once more at sigma_min, where the text is read out
        self._logits = torch.empty(0)

    @property
    def done(self) -> bool:
        return not self._levels

    @property
    def piece(self) -> CleanPiece | NoisyPiece:
        """What is to be computed next. Not to be asked for when `done`."""
        if self._unread:
            return CleanPiece(self._unread[0], self.caches)
        sigma = self._levels[0][0]
        z = self._sampler.state(self._estimate, sigma, self._evaluation)
        return NoisyPiece(z, self._estimate, sigma, self.plan.start, self.caches, self._sampler.point_temperature)

    @property
    def rows(self) -> int:
        """Positions in `piece`."""
        return len(self._unread[0]) if self._unread else self.plan.slots

    def supply(self, result: Tensor | Denoised) -> None:
        """Go on with what a runner made of `piece`."""
        if isinstance(result, Tensor):
            self._unread.popleft()
            self._features.append(result)
            return
        sigma, sigma_next = self._levels.popleft()
        if sigma_next is not None:
            self._estimate = self._sampler.advance(self._estimate, result.point, sigma, sigma_next)
        self._evaluation += 1
        self._logits = result.logits

    def outcome(self) -> Boundary | bytes:
        """A boundary for the next block, or the chunk's text after the last.

        The boundary is encoded even when the next block is on the same host, so that the text does not depend on
        which host holds which block.
        """
        plan, a = self.plan, self.architecture
        if self.is_last:
            return sample_symbols(self._logits, plan.temperature, plan.seed, plan.start)
        features = b""
        if a.context == "chained":
            features = FEATURES.encode(torch.cat(self._features) if self._features else torch.empty(0, a.width))
        return Boundary(self.codec.encode(self._estimate), features)


def clean_source(architecture: Architecture, reads_bytes: bool, clean: bytes, features: bytes) -> Tensor:
    """What a block's clean stream reads: bytes (positions,) int64, or decoded features (positions, width)."""
    a = architecture
    if reads_bytes or a.context == "own":
        return torch.frombuffer(bytearray(clean), dtype=torch.uint8).long() if clean else torch.empty(0).long()
    return FEATURES.decode(features, len(clean), a.width, FEATURE_LIMIT)


def clean_pieces(source: Tensor, reads: Sequence[int] = ()) -> list[Tensor]:
    """`source` (positions, ...) cut into pieces that are read one after the other; none for no positions.

    :param reads: lengths of what its first positions came in before; what is left came together. Rounding depends on
        what is read together.
    """
    parts = source.split([*reads, len(source) - sum(reads)])
    return [piece for part in parts if len(part) for piece in part.split(PIECE_POSITIONS)]


def run_alone(work: BlockWork, runner: BlockRunner) -> Boundary | bytes:
    """One block's work from beginning to end, in no company."""
    while not work.done:
        piece = work.piece
        if isinstance(piece, CleanPiece):
            work.supply(runner.read([piece])[0])
        else:
            work.supply(runner.denoise([piece])[0])
    return work.outcome()
