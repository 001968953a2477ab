"""Interfaces of runners: computing a part of a model on a host.

A call takes pieces of several requests at once. **The result for one of them does not depend on the others**, to
the last bit: a request's text may not depend on its company.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.model.layers import LayerCache
from stages.pictures.trajectory import PicturePiece

LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class CleanPiece:
    """New clean positions of one sequence, and the caches that they are appended to."""

    # Tokens (positions,) int64 where the part reads such, else features or hidden states (positions, width).
    source: Tensor
    # One for each layer of the part, of a batch of one; its length is the position of the first new one.
    caches: list[LayerCache]
    # So many of the last positions give, to the last bit, what they would give one by one, as guesses must. Those
    # before attend at once, in groups that end where the grid of ATTEND_POSITIONS does, and with the last of them.
    one_by_one: int = 0
    # Of a tree, depth first (stages/model/draft_tree.py), how far each is below the first new position; empty where
    # they follow each other. The first branch is appended, the others are not kept. All that part are one by one.
    depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class BranchPiece:
    """Continuations of one sequence: each sees the sequence and itself, none the others."""

    # Tokens (branches, positions) int64 where the part reads such, else hidden states (branches, positions, width).
    source: Tensor
    # The sequence, of at least one position: its length is the position at which every branch begins. Not changed.
    caches: list[LayerCache]


@dataclass(frozen=True)
class NoisyPiece:
    """The noisy slots of one sweep at one noise level."""

    z: Tensor  # (slots, code_dim)
    estimate: Tensor  # (slots, code_dim)
    sigma: float
    start: int  # position of the first slot
    caches: list[LayerCache]  # the clean positions that the slots see: those before `start`. Not changed.
    temperature: float = 1.0  # of the probabilities that the denoised point is taken at

    @property
    def divisor(self) -> float:
        """Divisor of the logits: at temperature 0 the likeliest token takes all."""
        return max(self.temperature, LEAST_TEMPERATURE)


@dataclass(frozen=True)
class Denoised:
    """One evaluation: what each slot may hold."""

    logits: Tensor  # (slots, vocabulary)
    point: Tensor  # D = softmax(logits / temperature) @ codes: (slots, code_dim)


class BlockRunner(ABC):
    """One block of a chain."""

    @abstractmethod
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        """Append clean positions; returns each piece's features (positions, width)."""

    @abstractmethod
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        """Evaluate every piece at its own noise level."""


class StageRunner(ABC):
    """One stage of an AR pipeline."""

    @abstractmethod
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        """Append positions; returns each piece's hidden states (positions, width)."""

    @abstractmethod
    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        """Evaluate positions that are not kept; returns each piece's hidden states (branches, positions, width)."""

    @abstractmethod
    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Logits (positions, vocabulary) of the token after each position of (positions, width) pieces; last stage
        only."""


class PictureRunner(ABC):
    """One part of a model that draws."""

    @abstractmethod
    def evaluate(self, pieces: Sequence[PicturePiece]) -> list[Tensor]:
        """Evaluate every piece at its own noise level; each of its pictures is what it would be alone.

        Returns F (pictures, tokens, patch_dim) of each piece, or hidden states (pictures, tokens, features).
        """
