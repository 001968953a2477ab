"""Experts: nets that learned one cluster of pictures each, and the router net that says which of them a state needs.

Decentralized diffusion models (arXiv 2501.05450): where p(k | z, sigma, class) is the probability that a noisy picture
comes from cluster k, the denoised picture of all data is the sum of p(k) D_k over the experts' own.
"""

from collections.abc import Collection, Generator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor, nn

from onesweep.stages.model.codec import StateCodec
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.randomness import Purpose, uniforms
from onesweep.stages.pictures.architecture import PictureArchitecture
from onesweep.stages.pictures.part import PicturePart, normed
from onesweep.stages.pictures.trajectory import (
    MAX_LEVELS,
    DrawPlan,
    PicturePiece,
    Trajectory,
    block_sigmas,
    range_sigmas,
)

# `once`: where a range of noise begins, one expert of it is drawn, for all of the range. `top1`: at each level the
# likeliest. `top2`: the two likeliest, weighted.
Rule = Literal["once", "top1", "top2"]
RULES: tuple[Rule, ...] = get_args(Rule)
MAX_MOVES = 2 * (MAX_LEVELS + 1)  # of a picture, from host to host: two evaluations a level at most


class RouterNet(nn.Module):
    """Layers of a small DiT, the mean over the patches, and a logit for each cluster."""

    def __init__(self, architecture: PictureArchitecture, experts: int) -> None:
        """:param architecture: that of the experts: patches, classes and width are theirs.
        :param experts: clusters; as many as the architecture has parts, unless these share noise ranges.
        """
        super().__init__()
        self.architecture, self.experts = architecture, experts
        self.index = architecture.parts  # its file comes after those of the experts
        # The first of two stages has a way in and no head. One layer: at low noise a picture's shape is enough, and at
        # high noise there is nothing to see but the class.
        self.trunk = PicturePart(replace(architecture, parts=2, layers=1), 0, "steps")
        self.head = nn.Linear(architecture.features, experts)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def restore_tables(self) -> None:
        """Compute what is not stored, as `PicturePart` does."""
        self.trunk.restore_tables()

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> Tensor:
        """Logits (pictures, experts). x: c_in z (pictures, tokens, patch_dim); sigma, classes: (pictures,)."""
        return self.read_out(self.trunk(x, sigma, classes))

    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits (pictures, experts) of the trunk's hidden states (pictures, tokens, features)."""
        logits: Tensor = self.head(normed(hidden).mean(1))
        return logits


@dataclass(frozen=True)
class Turn:
    """The state of a picture when an expert's turn comes: all that another host needs to go on."""

    expert: int | None = None  # None at the start: the router net is asked first
    other: int | None = None  # with `top2`, the second of the two experts of this level
    noise_range: int = 0
    level: int = 0
    estimate: Tensor | None = None  # E, (1, tokens, patch_dim); None where the picture is noise
    before: Tensor | None = None  # D of the level before, likewise, for 2M
    partial: Tensor | None = None  # F of the other, times its weight, (evaluations, tokens, patch_dim)


@dataclass(frozen=True)
class Ask:
    """An evaluation that a picture needs next."""

    expert: int  # the router net's trunk is the one after the last
    piece: PicturePiece
    turn: Turn | None  # None where no other host can have a part in it


class Consultation:
    """One picture and the experts that draw it: what each host computes, wherever the experts are."""

    def __init__(
        self, net: RouterNet, partition: NoisePartition, plan: DrawPlan, rule: Rule, codec: StateCodec
    ) -> None:
        """:param plan: of one picture.
        :param codec: of what goes from one expert to another, on whatever host that is.
        """
        self.net, self.architecture, self.experts = net, net.architecture, net.experts
        self.partition, self.plan, self.rule, self.codec = partition, plan, rule, codec

    def steps(self, turn: Turn, held: Collection[int]) -> Generator[Ask, Tensor, Tensor]:
        """Evaluations from `turn` on, each of which is sent its result; returns the picture's pixels.

        :param held: experts that are asked before others where two are due.
        """
        if self.rule == "once":
            return self._by_range(turn)
        return self._likeliest(turn) if self.rule == "top1" else self._two(turn, held)

    def _by_range(self, turn: Turn) -> Generator[Ask, Tensor, Tensor]:
        estimate, expert, sent = turn.estimate, turn.expert, turn.estimate
        ranges = len(self.partition.boundaries) - 1
        for noise_range in range(turn.noise_range, ranges):
            sigmas, is_last = block_sigmas(self.partition, noise_range, self.plan.levels), noise_range == ranges - 1
            trajectory = self._trajectory(sigmas, Turn(estimate=estimate), is_last)
            if expert is None:
                # To draw from p(k | z), not to take the likeliest, keeps the distribution: z is one of cluster k's own.
                odds = yield from self._posterior(trajectory)
                drawn = float(uniforms(self.plan.seed, Purpose.CHOICE, 0, 1, 1, noise_range)[0, 0])
                within = min(int((odds.cumsum(0) < drawn).sum()), self.experts - 1)
                expert = noise_range * self.experts + within
            at: Turn | None = Turn(expert, noise_range=noise_range, estimate=sent)
            while not trajectory.done:
                trajectory.supply((yield Ask(expert, trajectory.piece(), at)))
                at = None
            sent, expert = trajectory.estimate, None
            estimate = self._rounded(sent)
        return trajectory.pixels()

    def _likeliest(self, turn: Turn) -> Generator[Ask, Tensor, Tensor]:
        trajectory, expert = self._whole(turn), turn.expert
        asked: int | None = None
        while not trajectory.done:
            at = turn
            if expert is None:
                odds = yield from self._posterior(trajectory)
                expert = int(odds.argmax())
                at = replace(self._turn(trajectory), expert=expert)
                if asked not in (None, expert):
                    estimate, before = self._rounded(at.estimate), self._rounded(at.before)
                    trajectory = self._whole(replace(at, estimate=estimate, before=before))
            trajectory.supply((yield Ask(expert, trajectory.piece(), at)))
            expert, asked = None, expert
        return trajectory.pixels()

    def _two(self, turn: Turn, held: Collection[int]) -> Generator[Ask, Tensor, Tensor]:
        trajectory = self._whole(turn)
        partial: Tensor | None = turn.partial
        pair = [] if turn.expert is None or turn.other is None else [turn.expert, turn.other]
        while not trajectory.done:
            odds = yield from self._posterior(trajectory)
            if not pair:
                # Two numbers have one sum, so either may be asked first: the one that is here saves a trip.
                pair = sorted(odds.topk(2).indices.tolist(), key=lambda expert: expert not in held)
            for expert in pair if partial is None else pair[:1]:
                at = replace(self._turn(trajectory), expert=expert, other=sum(pair) - expert, partial=partial)
                f = (yield Ask(expert, trajectory.piece(), at)) * (odds[expert] / odds[pair].sum())
                partial = f if partial is None else partial + f
            assert partial is not None
            trajectory.supply(partial)
            pair, partial = [], None
        return trajectory.pixels()

    def _turn(self, trajectory: Trajectory) -> Turn:
        t = trajectory
        before = t.before if self.plan.solver == "2m" else None
        return Turn(level=t.at, estimate=t.estimate if t.at else None, before=before)

    def _posterior(self, trajectory: Trajectory) -> Generator[Ask, Tensor, Tensor]:
        """p(k | z, sigma, class), (experts,)."""
        piece = trajectory.piece()
        alone = PicturePiece(piece.x[:1], piece.sigma, piece.classes[:1])
        hidden = yield Ask(self.architecture.parts, alone, None)
        return self.net.read_out(hidden)[0].softmax(0)

    def _whole(self, turn: Turn) -> Trajectory:
        high, low = self.partition.sigma_max, self.partition.sigma_min
        return self._trajectory(range_sigmas(high, low, self.plan.levels), turn, is_last=True)

    def _trajectory(self, sigmas: list[float], turn: Turn, is_last: bool) -> Trajectory:
        return Trajectory(
            self.architecture,
            self.plan,
            self.partition.sigma_max,
            sigmas,
            is_last=is_last,
            estimate=turn.estimate,
            at=turn.level,
            before=turn.before,
        )

    def _rounded(self, rows: Tensor | None) -> Tensor | None:
        """As it comes out of a message."""
        if rows is None:
            return None
        return self.codec.round_trip(rows.flatten(0, 1), self.architecture.limit).view_as(rows)
