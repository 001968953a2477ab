"""One block's part of a sweep: Euler steps over its noise range, an evaluation at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.alphabet import Alphabet
from stages.architecture import Architecture
from stages.backends.base import BlockRunner, CleanPiece, Denoised, NoisyPiece
from stages.codec import ESTIMATE_LIMIT, FEATURE_LIMIT, HiddenInt8, StateCodec
from stages.grafting.architecture import GraftArchitecture
from stages.layers import LayerCache
from stages.noise import step_sigmas
from stages.partition import NoisePartition
from stages.randomness import sample_symbols
from stages.samplers import SAMPLERS

FEATURES = HiddenInt8()
"""How clean features travel between `chained` blocks."""
PIECE_POSITIONS = 128
"""Clean positions that are read at once: a long prompt is read in pieces, so that it does not hold up others.
Pieces are cut by a sequence's own positions, never by its company."""


@dataclass(frozen=True)
class SweepPlan:
    """What every block must agree on to denoise the same chunk."""

    seed: int
    start: int
    """Position of the first noisy slot: the number of clean symbols before the chunk."""
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
    slots: bytes = b""
    """Of a grafted chain: what the block made of the slots at its last evaluation."""


class BlockWork:
    """One block's work on one chunk: reads the new clean symbols, then denoises, a piece at a time.

    Ask for `piece`, have a BlockRunner compute it, hand the result to `supply`, until it is `done`.
    """

    def __init__(
        self,
        architecture: Architecture | GraftArchitecture,
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
        known = Alphabet(a.vocabulary).decode(clean)
        self._before = known[-1:] if a.hands_on_slots else None
        if before is not None and a.context == "chained":
            known = FEATURES.decode(before.features, len(known), a.width, FEATURE_LIMIT)
        if before is not None and a.hands_on_slots:
            self._before = FEATURES.decode(before.slots, plan.slots, a.width, FEATURE_LIMIT)
        self._unread = deque(clean_pieces(known, reads))
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
        self._slots: Tensor | None = None

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
        temperature = self._sampler.point_temperature
        return NoisyPiece(z, self._estimate, sigma, self.plan.start, self.caches, temperature, self._before)

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
        self._slots = result.features

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
        slots = b"" if self._slots is None else FEATURES.encode(self._slots)
        return Boundary(self.codec.encode(self._estimate), features, slots)


def clean_pieces(source: Tensor, reads: Sequence[int] = ()) -> list[Tensor]:
    """`source` (positions, ...) cut into pieces that are read one after the other; none for no positions.

    :param reads: lengths of what its first positions came in before; what is left came together. Rounding depends on
        what is read together.
    """
    return list(source.split(piece_lengths(len(source), reads)))


def piece_lengths(count: int, reads: Sequence[int] = ()) -> list[int]:
    """Lengths of the pieces that `clean_pieces` cuts `count` positions into."""
    together = [*reads, count - sum(reads)]
    return [min(PIECE_POSITIONS, read - at) for read in together for at in range(0, read, PIECE_POSITIONS)]


def run_alone(work: BlockWork, runner: BlockRunner) -> Boundary | bytes:
    """One block's work from beginning to end, in no company."""
    while not work.done:
        piece = work.piece
        if isinstance(piece, CleanPiece):
            work.supply(runner.read([piece])[0])
        else:
            work.supply(runner.denoise([piece])[0])
    return work.outcome()
