"""Experts: nets that learned one cluster of pictures each, and the router net that says which of them a state needs.

Decentralized diffusion models (arXiv 2501.05450): where p(k | z, sigma, class) is the probability that a noisy picture
comes from cluster k, the denoised picture of all data is the sum of p(k) D_k over the experts' own.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor, nn

from stages.model.codec import StateCodec
from stages.model.partition import NoisePartition
from stages.model.randomness import Purpose, uniforms
from stages.pictures.part import PictureArchitecture, PicturePart, normed
from stages.pictures.trajectory import MAX_LEVELS, DrawPlan, PicturePiece, Trajectory

# `once`: an expert is drawn at the first level, for all of them. `top1`: at each level the likeliest. To weight the two
# likeliest is no better, nor are experts within ranges of noise (docs/research/pictures.md).
Rule = Literal["once", "top1"]
RULES: tuple[Rule, ...] = get_args(Rule)
MAX_MOVES = MAX_LEVELS + 1  # of a picture, from host to host: one for each evaluation at most


class RouterNet(nn.Module):
    """Layers of a small DiT, the mean over the patches, and a logit for each cluster."""

    def __init__(self, architecture: PictureArchitecture) -> None:
        """:param architecture: that of the experts: patches, classes and width are theirs, and a part is a cluster."""
        super().__init__()
        self.architecture = architecture
        self.index = architecture.parts  # its file comes after those of the experts
        # The first of two stages has a way in and no head. One layer: at low noise a picture's shape is enough, and at
        # high noise there is nothing to see but the class.
        self.trunk = PicturePart(replace(architecture, parts=2, layers=1), 0, "steps")
        self.head = nn.Linear(architecture.features, architecture.parts)
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
    level: int = 0
    estimate: Tensor | None = None  # E, (1, tokens, patch_dim); None where the picture is noise
    before: Tensor | None = None  # D of the level before, likewise, for 2M


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
        self.net, self.architecture = net, net.architecture
        self.partition, self.plan, self.rule, self.codec = partition, plan, rule, codec

    def steps(self, turn: Turn) -> Generator[Ask, Tensor, Tensor]:
        """Evaluations from `turn` on, each of which is sent its result; returns the picture's pixels."""
        trajectory, expert = self._whole(turn), turn.expert
        asked: int | None = None
        while not trajectory.done:
            at = turn
            if expert is None:
                probs = yield from self._posterior(trajectory)
                expert = self._chosen(probs)
                before = trajectory.before if self.plan.solver == "2m" else None
                estimate = trajectory.estimate if trajectory.at else None
                at = Turn(expert=expert, level=trajectory.at, estimate=estimate, before=before)
                if asked not in (None, expert):
                    estimate, before = self._rounded(at.estimate), self._rounded(at.before)
                    trajectory = self._whole(replace(at, estimate=estimate, before=before))
            trajectory.supply((yield Ask(expert, trajectory.piece(), at)))
            # `once` stays with its expert, so only the first of its asks can need another host
            if self.rule == "top1":
                expert, asked = None, expert
        return trajectory.pixels()

    def _chosen(self, probs: Tensor) -> int:
        if self.rule == "top1":
            return int(probs.argmax())
        # To draw from p(k | z), not to take the likeliest, keeps the distribution: z is one of cluster k's own.
        drawn = float(uniforms(self.plan.seed, Purpose.CHOICE, 0, 1, 1)[0, 0])
        return min(int((probs.cumsum(0) < drawn).sum()), len(probs) - 1)

    def _posterior(self, trajectory: Trajectory) -> Generator[Ask, Tensor, Tensor]:
        """p(k | z, sigma, class), (experts,)."""
        piece = trajectory.piece()
        alone = PicturePiece(piece.x[:1], piece.sigma, piece.classes[:1])
        hidden = yield Ask(self.architecture.parts, alone, None)
        return self.net.read_out(hidden)[0].softmax(0)

    def _whole(self, turn: Turn) -> Trajectory:
        return Trajectory.whole(self.architecture, self.plan, self.partition, turn.estimate, turn.level, turn.before)

    def _rounded(self, rows: Tensor | None) -> Tensor | None:
        """As it comes out of a message."""
        if rows is None:
            return None
        return self.codec.round_trip(rows.flatten(0, 1), self.architecture.limit).view_as(rows)
