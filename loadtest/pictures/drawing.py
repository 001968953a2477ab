"""Drawing in one process, by the maths of the hosts, mode by mode."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from onesweep.serving.drawing import DEFAULT_GUIDANCE, EXPERT_RULES
from onesweep.stages.backends import backend_named
from onesweep.stages.backends.base import PictureRunner
from onesweep.stages.checkpoint.bundle import Bundle
from onesweep.stages.checkpoint.checkpoint import load_picture_part, load_router_net
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.limits import MAX_SEED
from onesweep.stages.model.codec import FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.pictures.experts import Consultation, Rule, Turn
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


@dataclass(frozen=True)
class DrawnSet:
    """Pictures of one mode, and what a picture cost."""

    pixels: Tensor  # (pictures, channels, height, width) uint8
    evaluations: float  # layers x evaluations of a picture
    compute_ms: float  # of one thread, a picture
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
        self.moves = 0  # of all pictures
        self.looks = 0  # of a router net at a batch of pictures

    @property
    def ranges(self) -> int:
        """Noise ranges: a picture takes one step in each at least."""
        return len(self.partition.boundaries) - 1

    def draw(self, classes: Sequence[int], seed: int, levels: int, solver: Solver, guidance: float) -> DrawnSet:
        """Picture i has the class `classes[i]` and the seed `seed` + i."""
        begin, drawn = time.process_time(), list[Tensor]()
        self.moves = self.looks = 0
        with torch.inference_mode():
            for at in range(0, len(classes), AT_ONCE):
                plan = DrawPlan(seed + at, tuple(classes[at : at + AT_ONCE]), levels, solver, guidance)
                drawn.append(self._batch(plan))
        compute_ms = (time.process_time() - begin) * 1000 / len(classes)
        done = float(self._levels_done(levels) * evaluations(guidance))
        # A router net has one layer, and looks at a picture once, whatever the guidance.
        done += self.looks / len(drawn)
        moves = self.moves / len(classes) if self.looks else None
        return DrawnSet(torch.cat(drawn), done, compute_ms, moves)

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


class ExpertSet(NetDrawing):
    """Experts (arXiv 2501.05450): each picture goes from one to the next, E rounded between them as on the wire."""

    def __init__(self, directory: Path, rule: Rule, codec: str) -> None:
        super().__init__(directory)
        self.net, self.rule, self.codec = load_router_net(directory), rule, codec_named(codec)
        self.runners.append(backend_named("torch").picture(self.net.trunk))

    def _levels_done(self, levels: int) -> int:
        return (levels + 1) * self.architecture.layers

    def _batch(self, plan: DrawPlan) -> Tensor:
        pixels, asked = dict[int, Tensor](), dict[int, int]()
        ways = []
        for picture, each in enumerate(plan.classes):
            alone = replace(plan, seed=(plan.seed + picture) & MAX_SEED, classes=(each,))
            ways.append(Consultation(self.net, self.partition, alone, self.rule, self.codec).steps(Turn()))
        asks = {picture: next(way) for picture, way in enumerate(ways)}
        self.looks += (plan.levels + 1) if self.rule == "top1" else 1
        while asks:
            results = dict[int, Tensor]()
            for expert, runner in enumerate(self.runners):
                mine = [picture for picture, ask in asks.items() if ask.expert == expert]
                found = runner.evaluate([asks[picture].piece for picture in mine]) if mine else []
                results.update(zip(mine, found, strict=True))
                if expert < self.architecture.parts:
                    self.moves += sum(asked.get(picture, expert) != expert for picture in mine)
                    asked.update(dict.fromkeys(mine, expert))
            for picture in list(asks):
                try:
                    asks[picture] = ways[picture].send(results[picture])
                except StopIteration as end:
                    pixels[picture] = end.value
                    del asks[picture]
        return torch.cat([pixels[picture] for picture in range(plan.pictures)])


def pixel_digests(bundle: Bundle, mode: str, codec: str | None, levels: int, seed: int, count: int) -> list[str]:
    """SHA-256 of the pixels of each of `count` pictures, drawn as a router's defaults have it.

    Picture i has the seed `seed` + i and the i-th class; after the last class comes the first.

    :param codec: None = that of the mode.
    """
    rule = EXPERT_RULES.get(mode)
    directory = getattr(bundle, "experts" if rule else mode)
    net: NetDrawing
    if rule is not None:
        net = ExpertSet(directory, rule, codec or "int8")
    else:
        net = ChainSet(directory, codec or "int8") if mode == "chain" else StepSet(directory, codec or "fp32")
    classes = [i % len(net.architecture.classes) for i in range(count)]
    drawn = net.draw(classes, seed, levels, DEFAULT_SOLVER, DEFAULT_GUIDANCE)
    return [hashlib.sha256(pixels.numpy().tobytes()).hexdigest() for pixels in drawn.pixels]
