"""Interface of a hop's work on its host: the kernel calls that it needs, one after the other, and its outcome."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onesweep.stages.backends.base import BranchPiece, CleanPiece, Denoised, NoisyPiece
from onesweep.stages.pictures.trajectory import PicturePiece
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import Outcome


@dataclass(frozen=True)
class KernelCall:
    """Work for the backend."""

    # The method of a runner that takes such pieces: equal ones can be computed in one call.
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    piece: CleanPiece | BranchPiece | NoisyPiece | PicturePiece | Tensor
    rows: int


class HopWork(ABC):
    """One hop on this host. Its message becomes that of the next host."""

    outcome: Outcome | None = None  # set once everything is computed
    # An event for the router beside an outcome for the next host; made when that is on its way.
    preview: Callable[[], stage_pb2.Event] | None = None

    # The event for the router where the outcome begins the next step.
    result: stage_pb2.Event | None = None

    @property
    @abstractmethod
    def rows(self) -> int:
        """Positions or patches in the next call."""

    @abstractmethod
    def next_op(self) -> KernelCall:
        """The next call; only while there is no outcome."""

    @abstractmethod
    def complete(self, result: Tensor | Denoised) -> None:
        """Continue with the result of the last call."""
