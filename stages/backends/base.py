"""Interfaces of runners, which compute a part of a model on a host.

A call covers pieces of several requests. **The result for one of them does not depend on the others**, to the last bit:
a request's text must not depend on what shares its batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.model.layers import LayerCache
from stages.pictures.trajectory import PicturePiece

MIN_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class CleanPiece:
    """New clean positions of one sequence, and the caches to append them to."""

    # Tokens (positions,) int64 if the part reads tokens, else features or hidden states (positions, width).
    source: Tensor
    # One for each layer of the part, with batch size one; its length is the position of the first new position.
    caches: list[LayerCache]
    # This many of the last positions compute, to the last bit, as they would one by one, as draft tokens must. Those
    # before attend at once, in groups that end where the grid of ATTEND_POSITIONS does, and with the last of them.
    one_by_one: int = 0
    # For a tree, depth first (stages/model/draft_tree.py): depth of each position below the first new one; empty for a
    # chain. The first branch is appended, the others are not kept. All positions of branches are computed one by one.
    depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class BranchPiece:
    """Continuations of one sequence: each sees the sequence and itself, but none of the others."""

    # Tokens (branches, positions) int64 if the part reads tokens, else hidden states (branches, positions, width).
    source: Tensor
    # The sequence, at least one position: its length is the position at which every branch begins. Not changed.
    caches: list[LayerCache]


@dataclass(frozen=True)
class NoisyPiece:
    """The noisy slots of one sweep at one noise level."""

    z: Tensor  # (slots, code_dim)
    estimate: Tensor  # (slots, code_dim)
    sigma: float
    start: int  # position of the first slot
    caches: list[LayerCache]  # the clean positions that the slots see: those before `start`. Not changed.
    temperature: float = 1.0  # of the probabilities that give the denoised point

    @property
    def divisor(self) -> float:
        """Divisor of the logits: at temperature 0 the likeliest token gets all the probability."""
        return max(self.temperature, MIN_TEMPERATURE)


@dataclass(frozen=True)
class Denoised:
    """The result of one evaluation of the slots."""

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
    """One part of a picture model."""

    @abstractmethod
    def evaluate(self, pieces: Sequence[PicturePiece]) -> list[Tensor]:
        """Evaluate every piece at its own noise level; each picture is the same as if computed alone.

        Returns F (pictures, tokens, patch_dim) of each piece, or hidden states (pictures, tokens, features).
        """
