"""Interface of a hop's work on its host: parsed, begun, computed call by call; and checks that several kinds need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from stages.backends.base import BranchPiece, CleanPiece, Denoised, NoisyPiece
from stages.errors import CodecError
from stages.host.parts import ModelKind
from stages.host.sessions import HostSession
from stages.model.vocabulary import Alphabet
from stages.pictures.trajectory import PicturePiece
from stages.v1 import stage_pb2
from stages.wire.messages import Outcome
from stages.wire.status import invalid


@dataclass(frozen=True)
class KernelCall:
    """Work for the backend."""

    # The method of a runner that takes such pieces: equal ones can be computed in one call.
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    piece: CleanPiece | BranchPiece | NoisyPiece | PicturePiece | Tensor
    rows: int


@dataclass(eq=False, kw_only=True)
class HopWork(ABC):
    """One hop on this host. Its fields are its message, checked and decoded."""

    hop: stage_pb2.Hop  # becomes the message for the next host, in place
    kind: ModelKind
    number: int  # 0, 1, 2 ... in a session
    outcome: Outcome | None = field(default=None, init=False)  # set once everything is computed
    # The event for the router where the outcome begins the next step.
    result: stage_pb2.Event | None = field(default=None, init=False)
    # An event for the router beside an outcome for the next host; made when that is on its way.
    preview: Callable[[], stage_pb2.Event] | None = field(default=None, init=False)

    # AR steps are computed before all else: a few rows, and a user who waits for each.
    is_step = False
    # The beginning of a long step, which has no result of its own; and whether other hops of the step follow.
    is_prefill = has_more = False

    def begin(self, session: HostSession, following: int) -> None:
        """Enter the host's first part.

        :param following: the block or stage after this host's.
        """
        self.session, self.following = session, following

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


@dataclass(eq=False, kw_only=True)
class TextWork(HopWork):
    """New symbols of one session, and what they are for."""

    start: int  # position of the first new symbol; 0 opens a session
    clean: Tensor  # the new symbols, (symbols,) int64
    reads: tuple[int, ...]  # in a replay, lengths of the reads in which the first of them came before

    @cached_property
    def positions(self) -> int:
        """Positions that the new symbols take."""
        return self.clean.shape[0]

    @cached_property
    def remembered(self) -> int:
        """Number of these positions that the session keeps."""
        return self.positions


def parse_symbols(data: bytes, alphabet: Alphabet) -> Tensor:
    """Symbols of `alphabet`, (symbols,) int64. Raises StatusError."""
    try:
        return alphabet.decode(data)
    except CodecError as error:
        raise invalid(str(error)) from None


def check_reads(reads: Sequence[int], clean: int) -> None:
    """Raise StatusError unless so many new symbols can have come in these reads."""
    # counted before they are looked at: of 60 MB of them that alone held the event loop for seconds
    if len(reads) > clean or not all(reads) or sum(reads) > clean:
        raise invalid(f"{len(reads)} reads, some maybe empty or long, do not fit {clean} clean symbols")


def check_extent(capacity: int, start: int, new: int, positions: int) -> None:
    """Raise StatusError unless a session of `capacity` positions has room for `new` symbols at `start`."""
    if not 1 <= capacity <= positions:
        raise invalid(f"a session of {capacity} positions does not fit the context of {positions}")
    if start + new > capacity:
        raise invalid(f"{new} symbols at position {start} do not fit the session's {capacity} positions")
