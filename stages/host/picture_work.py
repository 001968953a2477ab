"""Hops that carry pictures, on their way through this host's blocks or stages."""

from abc import abstractmethod
from collections import deque
from functools import partial

import torch
from torch import Tensor

from onesweep.stages.backends.base import Denoised, PictureRunner
from onesweep.stages.backends.rows import ROWS_TOGETHER
from onesweep.stages.host.hop_work import HopWork, KernelCall
from onesweep.stages.host.picture_validation import EXACT
from onesweep.stages.host.requests import ConsultRequest, DenoiseRequest, DrawRequest, PictureRequest
from onesweep.stages.host.sessions import Session
from onesweep.stages.model.codec import FEATURE_LIMIT
from onesweep.stages.pictures.experts import Ask, Consultation
from onesweep.stages.pictures.trajectory import PicturePiece, Trajectory, block_sigmas, range_sigmas
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import next_denoise


class _PictureWork(HopWork):
    """Evaluations of pictures, a few of them in a call."""

    def __init__(self, request: PictureRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        source = session.parts.plan.models[session.kind]
        assert source.manifest.partition is not None
        self.architecture, self.partition = source.manifest.picture_architecture, source.manifest.partition
        self.hop, self.session, self.following, self.plan = hop, session, following, request.plan
        self.number, self.codec = request.number, request.codec
        self._left = deque(session.parts.pictures[session.kind].items())
        self._runner: PictureRunner
        self._pieces = deque[PicturePiece]()
        self._results = list[Tensor]()

    @property
    def rows(self) -> int:
        return self._pieces[0].rows

    def next_op(self) -> KernelCall:
        return KernelCall(self._runner.evaluate, self._pieces[0], self.rows)

    def complete(self, result: Tensor | Denoised) -> None:
        assert isinstance(result, Tensor)
        self._pieces.popleft()
        self._results.append(result)
        if not self._pieces:
            out, self._results = torch.cat(self._results), []
            self._go_on(out)

    @abstractmethod
    def _go_on(self, out: Tensor) -> None:
        """Continue with the result of `_evaluate`, (evaluations, tokens, numbers)."""

    def _evaluate(self, piece: PicturePiece) -> None:
        # In one call, many pictures would keep every other hop waiting, and one that nobody waits for computing.
        count = max(ROWS_TOGETHER // self.architecture.tokens, 1)
        parts = zip(piece.x.split(count), piece.classes.split(count), strict=True)
        self._pieces.extend(PicturePiece(x, piece.sigma, classes) for x, classes in parts)

    def _event(self, trajectory: Trajectory, preview_of: int | None = None) -> stage_pb2.Event:
        """The pictures, or a preview after a block."""
        pictures = stage_pb2.Pictures(pixels=trajectory.pixels().numpy().tobytes())
        if preview_of is not None:
            pictures.preview, pictures.block = True, preview_of
        return stage_pb2.Event(session=self.hop.session, number=self.number, pictures=pictures)


class DrawWork(_PictureWork):
    """Pictures on their way through the host's blocks."""

    def __init__(self, request: DrawRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        super().__init__(request, hop, session, following)
        self._previews = request.previews
        self._begin(request.estimate)

    def _begin(self, estimate: Tensor | None) -> None:
        """Enter the next block with E."""
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

    def _go_on(self, out: Tensor) -> None:
        trajectory = self._trajectory
        trajectory.supply(out)
        if not trajectory.done:
            self._evaluate(trajectory.piece())
            return
        if trajectory.is_last:
            self.outcome = self._event(trajectory)
            return
        # at every boundary, so that pixels do not depend on which host holds which block
        rows = trajectory.estimate.flatten(0, 1)
        if self._left:
            limit = self.architecture.limit
            self._begin(self.codec.round_trip(rows, limit).view_as(trajectory.estimate))
            return
        self.hop.draw.block, self.hop.draw.estimate = self.following, self.codec.encode(rows)
        self.outcome = self.hop
        if self._previews:
            self.preview = partial(self._event, trajectory, self._block)


class DenoiseWork(_PictureWork):
    """One evaluation at one noise level, on its way through the host's stages."""

    def __init__(self, request: DenoiseRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        super().__init__(request, hop, session, following)
        self._request, (high, low) = request, self.partition.range(0)
        self._sigmas = range_sigmas(high, low, self.plan.levels)
        self._begin(self._trajectory().piece().x if request.hidden is None else request.hidden)

    def _trajectory(self) -> Trajectory:
        request, a = self._request, self.architecture
        return Trajectory(
            a,
            self.plan,
            self._sigmas[0],
            self._sigmas,
            is_last=True,
            estimate=request.estimate,
            at=request.level,
            before=request.before,
        )

    def _begin(self, x: Tensor) -> None:
        """Enter the next stage with patches or hidden states."""
        self._stage, self._runner = self._left.popleft()
        classes = self.plan.conditions(self.architecture)
        self._evaluate(PicturePiece(x, self._sigmas[self._request.level], classes))

    def _go_on(self, out: Tensor) -> None:
        if self._stage == self.architecture.parts - 1:
            self._step(out)
        elif self._left:
            self._begin(self.codec.round_trip(out.flatten(0, 1), FEATURE_LIMIT).view_as(out))
        else:
            self.hop.denoise.stage, self.hop.denoise.hidden = self.following, self.codec.encode(out.flatten(0, 1))
            self.outcome = self.hop

    def _step(self, f: Tensor) -> None:
        """Make the solver's step."""
        trajectory = self._trajectory()
        trajectory.supply(f)
        if trajectory.done:
            self.outcome = self._event(trajectory)
            return
        before = trajectory.before if self.plan.solver == "2m" else None
        payloads = (b"" if x is None else EXACT.encode(x.flatten(0, 1)) for x in (trajectory.estimate, before))
        self.outcome = next_denoise(self.hop, *payloads)


class ConsultWork(_PictureWork):
    """A picture that the experts on this host draw until another's turn comes."""

    def __init__(self, request: ConsultRequest, hop: stage_pb2.Hop, session: Session, following: int) -> None:
        super().__init__(request, hop, session, following)
        self.number = hop.consult.number  # of the event: that of the hop counts moves as well
        self._runners, net = session.parts.pictures[session.kind], session.parts.router_net
        assert net is not None
        consultation = Consultation(net, self.partition, self.plan, request.rule, self.codec)
        self._steps = consultation.steps(request.turn)
        self._ask(next(self._steps))

    def _ask(self, ask: Ask) -> None:
        if ask.expert in self._runners:
            self._runner = self._runners[ask.expert]
            self._evaluate(ask.piece)
            return
        turn, work = ask.turn, self.hop.consult
        assert turn is not None
        assert turn.expert is not None
        work.expert, work.level = turn.expert, turn.level
        work.moves += 1
        work.estimate, work.before = (
            b"" if rows is None else self.codec.encode(rows.flatten(0, 1)) for rows in (turn.estimate, turn.before)
        )
        self.outcome = self.hop

    def _go_on(self, out: Tensor) -> None:
        try:
            self._ask(self._steps.send(out))
        except StopIteration as end:
            pictures = stage_pb2.Pictures(pixels=end.value.numpy().tobytes(), moves=self.hop.consult.moves)
            self.outcome = stage_pb2.Event(session=self.hop.session, number=self.number, pictures=pictures)
