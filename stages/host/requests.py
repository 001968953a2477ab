"""Typed requests: hops after validation, their payloads decoded."""

from dataclasses import dataclass

from torch import Tensor

from onesweep.stages.backends.sweep import BlockInput, SweepPlan
from onesweep.stages.host.grammar import GrammarSettings
from onesweep.stages.host.parts import ModelKind
from onesweep.stages.model.codec import StateCodec
from onesweep.stages.model.prefill import read_lengths
from onesweep.stages.model.shaping import Shaping
from onesweep.stages.model.speculation import remembered_positions, tree_positions
from onesweep.stages.pictures.experts import Rule, Turn
from onesweep.stages.pictures.trajectory import DrawPlan


@dataclass(frozen=True, eq=False)
class HopRequest:
    """Work for one host's parts."""

    kind: ModelKind
    number: int  # 0, 1, 2 ... in a session.


@dataclass(frozen=True, eq=False)
class WorkRequest(HopRequest):
    """Text: the new symbols of one session, and what they are for."""

    start: int  # position of the first new symbol; 0 opens a session
    clean: Tensor  # the new symbols, (symbols,) int64
    reads: tuple[int, ...]  # in a replay, lengths of the reads in which the first of them came before

    @property
    def positions(self) -> int:
        """Positions that the new symbols take."""
        return self.clean.shape[0]

    @property
    def remembered(self) -> int:
        """Number of these positions that the session keeps."""
        return self.positions


@dataclass(frozen=True, eq=False)
class SweepRequest(WorkRequest):
    """A chunk of noisy slots on its way through the blocks."""

    plan: SweepPlan
    codec: StateCodec
    before: BlockInput | None  # none before block 0


@dataclass(frozen=True, eq=False)
class PipelineRequest(WorkRequest):
    """New symbols for a pipeline."""

    codec: StateCodec
    hidden: Tensor | None  # hidden states of the stage before, (rows, width); None before stage 0
    at_once: int  # so many of the new symbols, the first, attend at once; the others give what they would one by one

    @property
    def lengths(self) -> list[int]:
        """Lengths of the reads in which the host reads the new symbols."""
        return read_lengths(self.clean.shape[0], self.reads)

    def one_by_one(self, begin: int, count: int) -> int:
        """Number of those that do not attend at once, among `count` new symbols after the first `begin`."""
        return min(max(begin + count - self.at_once, 0), count)


@dataclass(frozen=True, eq=False)
class PrefillRequest(PipelineRequest):
    """The beginning of a long prompt; more of it follows."""

    for_drafting: bool  # this host's draft head reads it, too


@dataclass(frozen=True)
class Drafting:
    """Limits of the drafts that the host of the last stage makes: as in the message."""

    remaining: int
    most: int
    branches: int


@dataclass(frozen=True, eq=False)
class SamplingRequest(PipelineRequest):
    """New symbols, after which one is sampled."""

    seed: int
    temperature: float
    shaping: Shaping
    grammar: GrammarSettings | None
    logprobs: int | None  # most likely symbols to tell of beside the one that is drawn; None tells nothing
    draft: int  # how many of the new symbols, the last ones, are draft tokens
    depths: tuple[int, ...]  # of each draft token of a tree; empty for a chain
    drafting: Drafting | None  # limits of the last host's drafts; None where the router drafts

    @property
    def positions(self) -> int:
        return tree_positions(self.clean.shape[0], self.depths)

    @property
    def remembered(self) -> int:
        return remembered_positions(self.clean.shape[0], self.depths)

    @property
    def lengths(self) -> list[int]:
        return read_lengths(self.clean.shape[0], tree=len(self.depths))


@dataclass(frozen=True, eq=False)
class ScoreRequest(PipelineRequest):
    """New symbols, and candidates that may follow them. A later batch of them brings no symbols."""

    temperature: float
    candidates: Tensor  # (candidates, length) int64
    batch: int
    has_more: bool  # batches of the step


@dataclass(frozen=True, eq=False)
class PictureRequest(HopRequest):
    """Pictures on their way through a model."""

    plan: DrawPlan
    codec: StateCodec


@dataclass(frozen=True, eq=False)
class DrawRequest(PictureRequest):
    """Pictures for a chain's next blocks."""

    estimate: Tensor | None  # E so far, (pictures, tokens, patch_dim); None where they are noise
    previews: bool


@dataclass(frozen=True, eq=False)
class DenoiseRequest(PictureRequest):
    """One evaluation of pictures for the next stages of an undivided net."""

    estimate: Tensor | None  # likewise
    level: int
    before: Tensor | None  # the pictures denoised at the level before, likewise; None where the solver needs none
    hidden: Tensor | None  # of the stage before, (evaluations, tokens, features); None before stage 0


@dataclass(frozen=True, eq=False)
class ConsultRequest(PictureRequest):
    """A picture for the experts that are here."""

    rule: Rule
    turn: Turn
