"""Pictures on their way through the host's blocks or stages.

Every field is checked before anything of the pictures' size is allocated.
"""

import math
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stages.backends.base import PictureRunner
from stages.backends.rows import ROWS_TOGETHER
from stages.host.plan import ModelSource
from stages.host.scheduler import HopWork, KernelCall
from stages.host.sessions import HostSession
from stages.model.architecture import PictureArchitecture
from stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from stages.pictures.trajectory import (
    MAX_GUIDANCE,
    MAX_LEVELS,
    SOLVERS,
    DrawPlan,
    PicturePiece,
    Trajectory,
    block_sigmas,
    evaluations,
    max_pictures,
)
from stages.v1 import stage_pb2
from stages.wire.messages import next_denoise
from stages.wire.status import invalid

# E is a mean of numbers within the limit: rounding of its sums may exceed it by the last bits.
LIMIT_SLACK = 1.0001
EXACT = codec_named("fp32")


@dataclass(eq=False, kw_only=True)
class PictureWork(HopWork):
    """Pictures on their way through a model: evaluations, a few of them in a call."""

    plan: DrawPlan
    codec: StateCodec

    def begin(self, session: HostSession, following: int) -> None:
        super().begin(session, following)
        source = session.parts.plan.models[session.kind]
        assert source.manifest.partition is not None
        self.architecture, self.partition = source.manifest.picture_architecture, source.manifest.partition
        self._left = deque(session.parts.runners[session.kind].items())
        self._runner: PictureRunner
        self._pieces = deque[PicturePiece]()
        self._results = list[Tensor]()

    @property
    def rows(self) -> int:
        return self._pieces[0].rows

    def next_op(self) -> KernelCall:
        return KernelCall(self._runner.evaluate, self._pieces[0], self.rows)

    def complete(self, result: Tensor) -> None:
        self._pieces.popleft()
        self._results.append(result)
        if not self._pieces:
            out, self._results = torch.cat(self._results), []
            self._continue(out)

    @abstractmethod
    def _continue(self, out: Tensor) -> None:
        """Continue with the result of `_evaluate`, (evaluations, tokens, numbers)."""

    def _evaluate(self, piece: PicturePiece) -> None:
        # In one call, many pictures would keep all other hops waiting, and a hop of an ended request would run on.
        self._pieces.extend(piece.split(max(ROWS_TOGETHER // self.architecture.tokens, 1)))

    def _event(self, trajectory: Trajectory, preview_of: int | None = None) -> stage_pb2.Event:
        pictures = stage_pb2.Pictures(pixels=trajectory.pixels().numpy().tobytes())
        if preview_of is not None:
            pictures.preview, pictures.block = True, preview_of
        return stage_pb2.Event(session=self.hop.session, number=self.number, pictures=pictures)


@dataclass(eq=False, kw_only=True)
class DrawWork(PictureWork):
    """Pictures on their way through the host's blocks."""

    estimate: Tensor | None  # E so far, (pictures, tokens, patch_dim); None if the pictures are noise
    previews: bool

    def begin(self, session: HostSession, following: int) -> None:
        super().begin(session, following)
        self._enter(self.estimate)

    def _enter(self, estimate: Tensor | None) -> None:
        self._block, self._runner = self._left.popleft()
        self._trajectory = Trajectory(
            self.architecture,
            self.plan,
            self.partition.sigma_max,
            block_sigmas(self.partition, self._block, self.plan.levels),
            is_last=self._block == self.architecture.parts - 1,
            estimate=estimate,
        )
        self._evaluate(self._trajectory.piece())

    def _continue(self, out: Tensor) -> None:
        trajectory = self._trajectory
        trajectory.supply(out)
        if not trajectory.done:
            self._evaluate(trajectory.piece())
            return
        if trajectory.is_last:
            self.outcome = self._event(trajectory)
            return
        # round at every boundary, so that pixels do not depend on which host holds which block
        rows = trajectory.estimate.flatten(0, 1)
        if self._left:
            limit = self.architecture.limit
            self._enter(self.codec.round_trip(rows, limit).view_as(trajectory.estimate))
            return
        self.hop.draw.block, self.hop.draw.estimate = self.following, self.codec.encode(rows)
        self.outcome = self.hop
        if self.previews:
            self.preview = partial(self._event, trajectory, self._block)


@dataclass(eq=False, kw_only=True)
class DenoiseWork(PictureWork):
    """One evaluation at one noise level, on its way through the host's stages."""

    estimate: Tensor | None  # E so far, (pictures, tokens, patch_dim); None if the pictures are noise
    level: int
    before: Tensor | None  # the pictures denoised at the level before, likewise; None if the solver needs none
    hidden: Tensor | None  # from the stage before, (evaluations, tokens, features); None before stage 0

    def begin(self, session: HostSession, following: int) -> None:
        super().begin(session, following)
        self._trajectory = Trajectory.whole(
            self.architecture, self.plan, self.partition, self.estimate, self.level, self.before
        )
        self._enter(self._trajectory.piece().x if self.hidden is None else self.hidden)

    def _enter(self, x: Tensor) -> None:
        self._stage, self._runner = self._left.popleft()
        classes = self.plan.conditions(self.architecture)
        self._evaluate(PicturePiece(x, self._trajectory.sigma, classes))

    def _continue(self, out: Tensor) -> None:
        if self._stage == self.architecture.parts - 1:
            self._step(out)
        elif self._left:
            self._enter(self.codec.round_trip(out.flatten(0, 1), FEATURE_LIMIT).view_as(out))
        else:
            self.hop.denoise.stage, self.hop.denoise.hidden = self.following, self.codec.encode(out.flatten(0, 1))
            self.outcome = self.hop

    def _step(self, f: Tensor) -> None:
        trajectory = self._trajectory
        trajectory.supply(f)
        if trajectory.done:
            self.outcome = self._event(trajectory)
            return
        before = trajectory.before if self.plan.solver == "2m" else None
        payloads = (b"" if x is None else EXACT.encode(x.flatten(0, 1)) for x in (trajectory.estimate, before))
        self.outcome = next_denoise(self.hop, *payloads)


def parse_draw(hop: stage_pb2.Hop, source: ModelSource) -> DrawWork:
    """Raises StatusError, or CodecError."""
    draw = hop.draw
    a = source.manifest.picture_architecture
    plan = _plan(draw.drawing, a, least_levels=a.parts)
    if draw.block == 0 and draw.estimate:
        raise invalid("block 0 starts from noise: its message must carry no estimate")
    codec = codec_named(draw.codec)
    estimate = _pictures(draw.estimate, codec, plan, a) if draw.block else None
    return DrawWork(
        hop=hop,
        kind="chain",
        number=draw.number,
        plan=plan,
        codec=codec,
        estimate=estimate,
        previews=draw.previews,
    )


def parse_denoise(hop: stage_pb2.Hop, source: ModelSource) -> DenoiseWork:
    """Raises StatusError, or CodecError."""
    denoise, a, level = hop.denoise, source.manifest.picture_architecture, hop.denoise.level
    plan = _plan(denoise.drawing, a, least_levels=1)
    if level > plan.levels:
        raise invalid(f"level {level} does not exist: these pictures are done after level {plan.levels}")
    needs_before = level > 0 and plan.solver == "2m"
    if denoise.estimate and not level:
        raise invalid("level 0 starts from noise: its message must carry no estimate")
    if denoise.before and not needs_before:
        raise invalid("only solver 2m after level 0 uses the previously denoised pictures: send none")
    if denoise.hidden and not denoise.stage:
        raise invalid("stage 0 reads patches: its message must carry no hidden states")
    codec = hidden_codec(denoise.codec)
    estimate = _pictures(denoise.estimate, EXACT, plan, a) if level else None
    before = _pictures(denoise.before, EXACT, plan, a) if needs_before else None
    hidden = None
    if denoise.stage:
        rows = plan.evaluations * a.tokens
        hidden = codec.decode(denoise.hidden, rows, a.features, FEATURE_LIMIT).view(-1, a.tokens, a.features)
    return DenoiseWork(
        hop=hop,
        kind="steps",
        number=denoise.number,
        plan=plan,
        codec=codec,
        estimate=estimate,
        level=level,
        before=before,
        hidden=hidden,
    )


def _plan(drawing: stage_pb2.Drawing, a: PictureArchitecture, least_levels: int) -> DrawPlan:
    if not math.isfinite(drawing.guidance) or not 0 <= drawing.guidance <= MAX_GUIDANCE:
        raise invalid(f"guidance must be 0 to {MAX_GUIDANCE:g}, not {drawing.guidance}; 1 turns it off")
    pictures, most = len(drawing.classes), max_pictures(a, drawing.guidance)
    if not 1 <= pictures <= most:
        guided = "" if evaluations(drawing.guidance) == 1 else " with guidance"
        raise invalid(f"a hop of this model can have 1 to {most} pictures{guided}, not {pictures}")
    if (largest := max(drawing.classes)) > len(a.classes):
        raise invalid(
            f"unknown class {largest}; this model has classes 0 to {len(a.classes) - 1}, and {len(a.classes)} for none"
        )
    if not least_levels <= drawing.levels <= MAX_LEVELS:
        raise invalid(f"this model takes {least_levels} to {MAX_LEVELS} noise levels, not {drawing.levels}")
    solver = next((each for each in SOLVERS if each == drawing.solver), None)
    if solver is None:
        raise invalid(f"unknown solver {drawing.solver[:40]!r}; choose from {', '.join(SOLVERS)}")
    return DrawPlan(drawing.seed, tuple(drawing.classes), drawing.levels, solver, drawing.guidance)


def _pictures(payload: bytes, codec: StateCodec, plan: DrawPlan, a: PictureArchitecture) -> Tensor:
    """(pictures, tokens, patch_dim). Raises CodecError."""
    rows = codec.decode(payload, plan.pictures * a.tokens, a.patch_dim, a.limit * LIMIT_SLACK)
    return rows.view(-1, a.tokens, a.patch_dim)
