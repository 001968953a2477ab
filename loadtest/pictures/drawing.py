"""Drawing in one process, by the maths of the hosts: each mode, and the opponents that hosts do not serve."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onesweep.serving.drawing import DEFAULT_GUIDANCE
from onesweep.stages.backends import backend_named
from onesweep.stages.backends.base import PictureRunner
from onesweep.stages.checkpoint.bundle import Bundle
from onesweep.stages.checkpoint.checkpoint import load_picture_part, load_router_net
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.model.randomness import Purpose, uniforms
from onesweep.stages.pictures.trajectory import (
    DEFAULT_SOLVER,
    DrawPlan,
    PicturePiece,
    Solver,
    Trajectory,
    block_sigmas,
    evaluations,
    range_sigmas,
)

# More would only wait for memory: a matrix product gains nothing beyond some thousand rows.
AT_ONCE = 100  # pictures that are drawn together
NEAR = 1  # of 255: how near `picard` comes to `steps` before it ends


@dataclass(frozen=True)
class DrawnSet:
    """Pictures of one mode, and what a picture cost."""

    pixels: Tensor  # (pictures, channels, height, width) uint8
    evaluations: float  # layers x evaluations of a picture
    compute_ms: float  # of one thread, a picture
    passes: float = 0.0  # `picard`: trips until a batch of pictures was there, in the mean
    moves: float | None = None  # of experts: changes of the host on a picture's way, in the mean


class NetDrawing(ABC):
    """One way of drawing with the nets of a checkpoint."""

    hidden: StateCodec | None = None  # of hidden states between two stages, where they are not exact

    def __init__(self, directory: Path, backend: str = "torch") -> None:
        """Load and gate the weights. Raises OnesweepError."""
        manifest = read_manifest(directory)
        assert manifest.partition is not None
        self.architecture, self.partition = manifest.picture_architecture, manifest.partition
        maker = backend_named(backend)
        self.runners: list[PictureRunner] = [
            maker.picture(load_picture_part(directory, i)) for i in range(self.architecture.parts)
        ]
        self.passes = list[int]()
        self.moves = 0  # of all pictures
        self.looks = 0  # of a router net at a batch of pictures

    @property
    def ranges(self) -> int:
        """Noise ranges: a picture takes one step in each at least."""
        return len(self.partition.boundaries) - 1

    def draw(self, classes: Sequence[int], seed: int, levels: int, solver: Solver, guidance: float) -> DrawnSet:
        """Picture i has the class `classes[i]` and the seed `seed` + i."""
        begin, drawn = time.process_time(), list[Tensor]()
        self.passes, self.moves, self.looks = [], 0, 0
        with torch.inference_mode():
            for at in range(0, len(classes), AT_ONCE):
                plan = DrawPlan(seed + at, tuple(classes[at : at + AT_ONCE]), levels, solver, guidance)
                drawn.append(self._batch(plan))
        compute_ms = (time.process_time() - begin) * 1000 / len(classes)
        passes = sum(self.passes) / len(self.passes) if self.passes else 0.0
        done = self._levels_done(levels) * (passes or 1) * evaluations(guidance)
        # A router net has one layer, and looks at a picture once, whatever the guidance.
        done += self.looks / len(drawn)
        moves = self.moves / len(classes) if self.looks else None
        return DrawnSet(torch.cat(drawn), done, compute_ms, passes, moves)

    def _levels_done(self, levels: int) -> int:
        """Layers that evaluate a picture, over all levels."""
        return (levels + 1) * self.architecture.layers * self.architecture.parts

    @abstractmethod
    def _batch(self, plan: DrawPlan) -> Tensor:
        """Pixels of the pictures of `plan`."""

    def _whole(self, plan: DrawPlan) -> Trajectory:
        sigmas = range_sigmas(self.partition.sigma_max, self.partition.sigma_min, plan.levels)
        return Trajectory(self.architecture, plan, self.partition.sigma_max, sigmas, is_last=True)

    def _through(self, piece: PicturePiece) -> Tensor:
        """F of an undivided net."""
        x = piece.x
        for i, runner in enumerate(self.runners):
            if i and self.hidden is not None:
                x = self.hidden.round_trip(x.flatten(0, 1), FEATURE_LIMIT).view_as(x)
            x = runner.evaluate([PicturePiece(x, piece.sigma, piece.classes)])[0]
        return x


class ChainSet(NetDrawing):
    """One block after the other, E rounded between them as on the wire."""

    def __init__(self, directory: Path, codec: str) -> None:
        super().__init__(directory)
        self.codec = codec_named(codec)

    def _levels_done(self, levels: int) -> int:
        return (levels + 1) * self.architecture.layers

    def _batch(self, plan: DrawPlan) -> Tensor:
        a, estimate = self.architecture, None
        for block, runner in enumerate(self.runners):
            sigmas, is_last = block_sigmas(self.partition, block, plan.levels), block == a.parts - 1
            trajectory = Trajectory(a, plan, self.partition.sigma_max, sigmas, is_last=is_last, estimate=estimate)
            while not trajectory.done:
                trajectory.supply(runner.evaluate([trajectory.piece()])[0])
            rows = trajectory.estimate.flatten(0, 1)
            estimate = self.codec.round_trip(rows, a.limit).view_as(trajectory.estimate)
        return trajectory.pixels()


class StepSet(NetDrawing):
    """An undivided net, a level after the other: `steps`, and `local`."""

    def __init__(self, directory: Path, codec: str = "fp32") -> None:
        """:param codec: of the hidden states between two stages."""
        super().__init__(directory)
        self.hidden = None if codec == "fp32" else hidden_codec(codec)

    def _batch(self, plan: DrawPlan) -> Tensor:
        trajectory = self._whole(plan)
        while not trajectory.done:
            trajectory.supply(self._through(trajectory.piece()))
        return trajectory.pixels()


class DisplacedSet(StepSet):
    """AsyncDiff (arXiv 2406.06911): each stage works at once on what the one before made a level ago."""

    def _batch(self, plan: DrawPlan) -> Tensor:
        trajectory = self._whole(plan)
        held = list[Tensor]()  # of each stage, what it made at the level before
        while not trajectory.done:
            piece = trajectory.piece()
            if not held:  # the first level is computed in order
                for runner in self.runners:
                    x = held[-1] if held else piece.x
                    held.append(runner.evaluate([PicturePiece(x, piece.sigma, piece.classes)])[0])
            else:
                inputs = [piece.x, *held[:-1]]
                pairs = zip(self.runners, inputs, strict=True)
                held = [runner.evaluate([PicturePiece(x, piece.sigma, piece.classes)])[0] for runner, x in pairs]
            trajectory.supply(held[-1])
        return trajectory.pixels()


class PicardSet(StepSet):
    """ParaDiGMS (arXiv 2305.16317): all levels at once from guesses of their states, again until the picture stays.

    After pass p the first p levels are those of `steps`; it ends where the picture is within 1/255 of theirs.
    """

    def _batch(self, plan: DrawPlan) -> Tensor:
        wanted = super()._batch(plan).int()
        results, pixels, passes = list[Tensor](), torch.zeros(()), 0
        while not results or bool(((pixels.int() - wanted).abs() > NEAR).any()):
            trajectory, fresh = self._whole(plan), list[Tensor]()
            while not trajectory.done:
                at = trajectory.at
                # The states that this pass evaluates are those which the results of the last one lead to.
                fresh.append(self._through(trajectory.piece()))
                trajectory.supply(results[at] if results else fresh[0])
            results, passes = fresh, passes + 1
            pixels = self._led(plan, results)
        self.passes.append(passes)
        return pixels

    def _led(self, plan: DrawPlan, results: Sequence[Tensor]) -> Tensor:
        """Pixels that the results of all levels lead to."""
        trajectory = self._whole(plan)
        while not trajectory.done:
            trajectory.supply(results[trajectory.at])
        return trajectory.pixels()


class ExpertSet(NetDrawing):
    """Experts (arXiv 2501.05450), of whom a router net chooses at every level: `experts:1`, `experts:2`.

    With `top` 1 the likeliest draws, and E moves to its host when another one leads; with 2, the two likeliest
    predict, and their results are weighted.
    """

    def __init__(self, directory: Path, top: int, codec: str) -> None:
        super().__init__(directory)
        self.router_net, self.top, self.codec = load_router_net(directory), top, codec_named(codec)
        self.experts = self.router_net.experts
        if top > 1 and self.ranges > 1:
            raise InputError(f"{directory} has experts for {self.ranges} noise ranges: only mode grid draws with them")

    def _levels_done(self, levels: int) -> int:
        return (levels + 1) * self.architecture.layers * self.top

    def _batch(self, plan: DrawPlan) -> Tensor:
        trajectory, leaders = self._whole(plan), None
        while not trajectory.done:
            p = self._posterior(trajectory)
            best = p.topk(self.top)
            if self.top == 1:
                if leaders is not None:
                    trajectory = self._moved(trajectory, (best.indices != leaders)[:, 0])
                leaders = best.indices
            weights = torch.zeros_like(p).scatter(1, best.indices, best.values)
            trajectory.supply(self._mixed(trajectory.piece(), weights / weights.sum(1, keepdim=True)))
        return trajectory.pixels()

    def _posterior(self, trajectory: Trajectory) -> Tensor:
        """p(k | z, sigma, class) of all pictures: (pictures, experts)."""
        self.looks += 1
        piece, n = trajectory.piece(), trajectory.plan.pictures
        return self.router_net.posterior(piece.x[:n], piece.sigma, piece.classes[:n])

    def _moved(self, trajectory: Trajectory, moved: Tensor) -> Trajectory:
        """The trajectory with what travels rounded: E, and D of the level before, for 2M need not start anew."""
        assert trajectory.before is not None
        self.moves += int(moved.sum())
        states = (trajectory.estimate, trajectory.before)
        estimate, before = (torch.where(moved[:, None, None], self._rounded(state), state) for state in states)
        t, high = trajectory, self.partition.sigma_max
        return Trajectory(
            t.architecture, t.plan, high, t.sigmas, is_last=True, estimate=estimate, at=t.at, before=before
        )

    def _rounded(self, rows: Tensor) -> Tensor:
        return self.codec.round_trip(rows.flatten(0, 1), self.architecture.limit).view_as(rows)

    def _mixed(self, piece: PicturePiece, weights: Tensor, noise_range: int = 0) -> Tensor:
        """F, weighted over the experts of a noise range. D is linear in F, and so is guidance.

        weights: (pictures, experts); experts of weight 0 are not asked.
        """
        weights = weights.repeat(len(piece.x) // len(weights), 1)
        f = torch.zeros_like(piece.x)
        for k in range(self.experts):
            rows = weights[:, k] > 0
            if rows.any():
                asked = PicturePiece(piece.x[rows], piece.sigma, piece.classes[rows])
                found = self.runners[noise_range * self.experts + k].evaluate([asked])[0]
                f[rows] += weights[rows, k, None, None] * found
        return f


class GridSet(ExpertSet):
    """Experts within noise ranges: where a range begins, one is drawn for all of it. One range: `experts:once`."""

    # To draw from p(k | z), not to take the likeliest, keeps the distribution: z is then one of cluster k's own.

    def __init__(self, directory: Path, codec: str) -> None:
        super().__init__(directory, 1, codec)

    def _batch(self, plan: DrawPlan) -> Tensor:
        a, estimate, seeds = self.architecture, None, range(plan.seed, plan.seed + plan.pictures)
        for noise_range in range(self.ranges):
            sigmas, is_last = block_sigmas(self.partition, noise_range, plan.levels), noise_range == self.ranges - 1
            trajectory = Trajectory(a, plan, self.partition.sigma_max, sigmas, is_last=is_last, estimate=estimate)
            sums = self._posterior(trajectory).cumsum(1)
            drawn = np.array([uniforms(seed, Purpose.CHOICE, 0, 1, 1, noise_range)[0, 0] for seed in seeds])
            chosen = (sums < torch.from_numpy(drawn)[:, None]).sum(1).clamp(max=self.experts - 1)
            weights = torch.nn.functional.one_hot(chosen, self.experts).float()
            while not trajectory.done:
                trajectory.supply(self._mixed(trajectory.piece(), weights, noise_range))
            estimate = self._rounded(trajectory.estimate)
            self.moves += plan.pictures * (not is_last)
        return trajectory.pixels()


def pixel_digests(bundle: Bundle, mode: str, codec: str | None, levels: int, seed: int, count: int) -> list[str]:
    """SHA-256 of the pixels of each of `count` pictures, drawn as a router's defaults have it.

    Picture i has the seed `seed` + i and the i-th class; after the last class comes the first.

    :param codec: None = that of the mode.
    """
    directory = getattr(bundle, mode)
    net = ChainSet(directory, codec or "int8") if mode == "chain" else StepSet(directory, codec or "fp32")
    classes = [i % len(net.architecture.classes) for i in range(count)]
    drawn = net.draw(classes, seed, levels, DEFAULT_SOLVER, DEFAULT_GUIDANCE)
    return [hashlib.sha256(pixels.numpy().tobytes()).hexdigest() for pixels in drawn.pixels]
