"""Training of nets that draw: separate blocks, an undivided net, or one small net for all noise levels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from stages.checkpoint.checkpoint import load_picture_part, save_part, save_parts
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import CheckpointError, ConfigError
from stages.model.architecture import DATA_STD, PictureArchitecture
from stages.model.layers import listed
from stages.model.partition import NoisePartition, equal_probability
from stages.model.randomness import Purpose, uniforms
from stages.pictures.part import PictureKind, PicturePart
from stages.settings import limits
from trainer.blocks.checkpoint_dir import open_checkpoint_dir
from trainer.blocks.config import MatrixOptimizer, RunConfig
from trainer.blocks.run import StepLoss
from trainer.blocks.train import is_trained, train_part
from trainer.pictures.data import LabelledPictures, PictureSet

VALID_PICTURES = 512
_SIZE = limits(minimum=1, maximum=1 << 14)


@dataclass(frozen=True)
class PictureConfig(RunConfig):
    """One run. A block and the undivided net both do `steps` steps, so both train equally many layers x pictures."""

    patch: int = field(default=4, metadata=_SIZE)
    parts: int = field(default=3, metadata=_SIZE)
    layers: int = field(default=2, metadata=_SIZE)  # of one block; the undivided net has `parts` times as many
    features: int = field(default=96, metadata=_SIZE)
    heads: int = field(default=4, metadata=_SIZE)
    condition_dim: int = field(default=96, metadata=_SIZE)
    sigma_min: float = field(default=0.002, metadata=limits(above=0))
    sigma_max: float = field(default=80.0, metadata=limits(above=0))
    # Share of its log-width by which training widens a block's noise range.
    overlap: float = field(default=0.05, metadata=limits(minimum=0, maximum=0.5))
    batch: int = field(default=64, metadata=_SIZE)  # pictures per step
    drop_class: float = field(default=0.1, metadata=limits(minimum=0, maximum=1))  # share trained without its class
    # One rate for everything: with AdamW, the layers' matrices need no rate of their own.
    learning_rate: float = field(default=2e-3, metadata=limits(minimum=0))
    matrix_learning_rate: float = field(default=2e-3, metadata=limits(minimum=0))
    # Muon computes in bfloat16, which takes 65 times as long on processors with only AVX2.
    matrix_optimizer: MatrixOptimizer = "adamw"
    weight_decay: float = field(default=0.01, metadata=limits(minimum=0))
    evaluate_every: int = field(default=2000, metadata=limits(minimum=1))
    log_every: int = field(default=100, metadata=limits(minimum=1))

    def architecture(self, pictures: PictureSet, parts: int | None = None) -> PictureArchitecture:
        """The architecture of a net for these pictures. Raises ShapeError."""
        _, channels, height, width = pictures.train.pixels.shape
        # rounded: sums in another order would change the architecture on another machine
        mean, deviation = (round(float(x) / 255, 4) for x in torch.std_mean(pictures.train.pixels.double())[::-1])
        return PictureArchitecture(
            height=height,
            width=width,
            channels=channels,
            classes=pictures.classes,
            patch=self.patch,
            parts=parts or self.parts,
            layers=self.layers,
            features=self.features,
            heads=self.heads,
            condition_dim=self.condition_dim,
            mean=mean,
            deviation=max(deviation, 1e-3),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sigma_min < self.sigma_max:
            raise ConfigError(f"sigma_min {self.sigma_min} must be below sigma_max {self.sigma_max}")


class UndividedNet(nn.Module):
    """All stages of a net in one process."""

    def __init__(self, parts: Sequence[PicturePart]) -> None:
        super().__init__()
        self.parts = listed(parts)

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> Tensor:
        """Like `PicturePart`, from c_in z to F."""
        for part in self.parts:
            x = part(x, sigma, classes)
        return x


class PictureTask:
    """Training of one net to denoise within a range of noise levels."""

    def __init__(
        self,
        name: str,
        net: PicturePart | UndividedNet,
        architecture: PictureArchitecture,
        partition: NoisePartition,
        block: int,
        pictures: PictureSet,
        config: PictureConfig,
    ) -> None:
        """:param block: the index of the net's noise range in `partition`."""
        self.name, self.module, self.trained = name, net.to(pictures.device), [net]
        self.architecture, self.partition, self.block = architecture, partition, block
        self.pictures, self.config = pictures, config

    def loss(self, step: int) -> StepLoss:
        # a pure function of seed, block and step, so that a resumed run sees the same batches and noise
        draws = uniforms(self.config.seed, Purpose.TRAINING, 1 + self.block, 1, 1, step)
        generator = torch.Generator().manual_seed(int(draws[0, 0] * 2**53))
        chosen = torch.randint(len(self.pictures.train), (self.config.batch,), generator=generator)
        loss = self._loss(self.pictures.train, chosen, generator, self.config.drop_class)
        return StepLoss(loss, {"denoise_loss": loss.detach()})

    def evaluate(self) -> dict[str, float]:
        """The loss on validation pictures with their classes, at fixed noise."""
        chosen = torch.arange(min(len(self.pictures.valid), VALID_PICTURES))
        loss = self._loss(self.pictures.valid, chosen, torch.Generator().manual_seed(0), 0.0)
        return {"valid_denoise_loss": float(loss)}

    def _loss(
        self, pictures: LabelledPictures, chosen: Tensor, generator: torch.Generator, drop_class: float
    ) -> Tensor:
        """mean (F - F*)^2 with F* = (y - c_skip z) / c_out (EDM, arXiv 2206.00364, section 5)."""
        taken = pictures.take(chosen)
        y, n = self.architecture.to_rows(taken.pixels), len(taken)
        # Spread a batch's noise levels evenly over the range's probability, so that the loss varies less.
        uniform = (torch.arange(n) + torch.rand(n, generator=generator)) / n
        levels = self.partition.sample(self.block, uniform)
        z = y + levels[:, None, None] * torch.randn(y.shape, generator=generator)
        hidden = torch.rand(n, generator=generator) < drop_class
        classes = torch.where(hidden, len(self.architecture.classes), taken.labels)
        y, z, levels, classes = (x.to(self.pictures.device) for x in (y, z, levels, classes))
        sigma = levels[:, None, None]
        variance = sigma**2 + DATA_STD**2
        target = (y - DATA_STD**2 / variance * z) * variance.sqrt() / (sigma * DATA_STD)
        return (self.module(z / variance.sqrt(), levels, classes) - target).square().mean()


def train_picture_blocks(
    config: PictureConfig, pictures: PictureSet, out: Path, only: int | None = None, start: Path | None = None
) -> Manifest:
    """Train the blocks of a chain into the checkpoint `out`, one in memory at a time, skipping those that are done.

    `only` selects one. `start` is the checkpoint of a net for all noise levels, from which all blocks branch.
    """
    architecture = config.architecture(pictures)
    if only is not None and not 0 <= only < architecture.parts:
        raise ConfigError(f"block {only} does not exist: this chain has blocks 0 to {architecture.parts - 1}")
    if start is not None and read_manifest(start).picture_architecture != replace(architecture, parts=1):
        raise CheckpointError(f"{start} is not a one-part net of these blocks' shape: train one with `local`")
    partition = equal_probability(architecture.parts, config.sigma_min, config.sigma_max, overlap=config.overlap)
    manifest = open_checkpoint_dir(out, new_picture_manifest("chain", architecture, partition, config, pictures, start))
    for index in range(architecture.parts) if only is None else [only]:
        if is_trained(out, manifest, index, f"block-{index}"):
            continue
        part = new_picture_part(architecture, index, "chain", config.seed + index, start)
        task = PictureTask(f"block-{index}", part, architecture, partition, index, pictures, config)
        manifest = train_part(task, config, out, manifest, task.name, partial(save_part, out, part))
    return manifest


def train_undivided(config: PictureConfig, pictures: PictureSet, out: Path, large: bool) -> Manifest:
    """Train one net for all noise levels: `large`, with as many stages as a chain has blocks, or the size of one block,
    with that many times the steps."""
    parts = config.parts if large else 1
    # as many layers x pictures as all blocks together
    config = config if large else replace(config, steps=config.steps * config.parts)
    architecture = config.architecture(pictures, parts)
    # No margin: no other net works beyond the ends of its range.
    partition = equal_probability(1, config.sigma_min, config.sigma_max, overlap=0.0)
    manifest = open_checkpoint_dir(out, new_picture_manifest("steps", architecture, partition, config, pictures))
    if is_trained(out, manifest, 0, "steps"):
        return manifest
    stages = [new_picture_part(architecture, index, "steps", config.seed + index) for index in range(parts)]
    task = PictureTask("steps", UndividedNet(stages), architecture, partition, 0, pictures, config)
    return train_part(task, config, out, manifest, task.name, partial(save_parts, out, stages))


def new_picture_part(
    architecture: PictureArchitecture, index: int, kind: PictureKind, seed: int, start: Path | None = None
) -> PicturePart:
    """A part before training, with the weights of the net in `start` if given. Raises CheckpointError."""
    torch.manual_seed(seed)
    part = PicturePart(architecture, index, kind)
    if start is not None:
        part.load_state_dict(load_picture_part(start, 0).state_dict())
    return part


def new_picture_manifest(
    kind: PictureKind,
    architecture: PictureArchitecture,
    partition: NoisePartition,
    config: PictureConfig,
    pictures: PictureSet,
    start: Path | None = None,
) -> Manifest:
    """The manifest of a training without any trained part."""
    from_start = {} if start is None else {"start": read_manifest(start).digest()}
    return Manifest(
        kind=kind,
        architecture=architecture,
        parts=(None,) * architecture.parts,
        partition=partition,
        data={"name": pictures.name, "train_pictures": len(pictures.train), "train_sha256": pictures.digest},
        training=config.record() | from_start,
    )
