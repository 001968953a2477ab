"""Inventory of each worker: the tensors of its part and of its copies, counted on the meta device."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from stages.errors import ConfigError
from stages.model.block import Codes
from trainer.blocks.config import TrainingConfig
from trainer.blocks.optimizer import OptimizerSet
from trainer.rounds.codecs import Shapes, numel, parameter_shapes
from trainer.rounds.features import FeatureFormat, is_fed, passes_on
from trainer.rounds.parts import HEAD
from trainer.rounds.spec import RunSpec

# Passes of a layer that is only read, that a gradient goes through, and that is trained.
FORWARD, THROUGH, TRAINED = 1, 2, 3
FITTED = (1, 2, 3)  # heads of the small models whose sizes tell how a model grows with its width
MAX_WIDTH = 1 << 20
FP32_BYTES = 4


@dataclass(frozen=True)
class PartInventory:
    """One part, as a worker has it."""

    name: str
    shapes: Shapes  # parameters that are trained, and travel
    trained_bytes: int  # weights, gradients and optimizer state
    copied: Mapping[str, Shapes]  # published parameters of the parts that it has copies of, by name
    passes: int  # layers times passes of one step, a layer counts FORWARD, THROUGH or TRAINED
    reads: FeatureFormat | None = None  # features that the worker of the part before passes on in a round
    makes: FeatureFormat | None = None  # features that it passes on to that of the next part
    hops: int = 0  # that a step's features make from the first part to the last

    @property
    def weight_bytes(self) -> int:
        return numel(self.shapes) * FP32_BYTES

    @property
    def optimizer_bytes(self) -> int:
        """One moment under Muon, two under AdamW."""
        return self.trained_bytes - 2 * self.weight_bytes

    @property
    def copied_bytes(self) -> int:
        """Copies twice: as they were fetched, for the next difference to be added, and in the modules that read."""
        # The modules of a scorer's stages have no own heads.
        fetched = sum(map(numel, self.copied.values()))
        heads = sum(
            math.prod(shape) for like in self.copied.values() for name, shape in like.items() if name.startswith(HEAD)
        )
        return (2 * fetched - heads) * FP32_BYTES


def take_inventory(config: TrainingConfig) -> tuple[PartInventory, ...]:
    """All parts of a model, made of tensors without memory, so that a model of any size may be asked for."""
    spec = RunSpec(config, Codes(config.noise.code_seed, config.architecture.code_dim), None)
    names = spec.parts
    with torch.device("meta"):
        modules = [spec.module(index) for index in range(len(names))]
    known = {name: parameter_shapes(module) for name, module in zip(names, modules, strict=True)}
    return tuple(
        PartInventory(
            name=name,
            shapes=known[name],
            trained_bytes=trained_bytes(module, config),
            copied={names[i]: known[names[i]] for i in (*before(config, index), *later(config, index))},
            passes=_passes(config, index),
            reads=FeatureFormat.of(config) if is_fed(config, index) else None,
            makes=FeatureFormat.of(config) if passes_on(config, index) else None,
            hops=sum(passes_on(config, i) for i in range(len(names))),
        )
        for index, (name, module) in enumerate(zip(names, modules, strict=True))
    )


def trained_bytes(module: nn.Module, config: TrainingConfig) -> int:
    """Weights and gradients once, one moment under Muon and two under AdamW: all fp32."""
    muon, adamw = (
        sum(p.numel() for p in optimizer.param_groups[0]["params"])
        for optimizer in OptimizerSet(module, config).optimizers
    )
    return (3 * muon + 4 * adamw) * FP32_BYTES


def before(config: TrainingConfig, index: int) -> range:
    """Parts that part `index` runs for their features."""
    return range(index if config.rounds.model == "scorer" and not is_fed(config, index) else 0)


def later(config: TrainingConfig, index: int) -> range:
    """Parts through whose copies part `index` looks ahead; a scorer's stage holds them whether it does or not."""
    return range(index + 1, config.architecture.parts if config.rounds.model == "scorer" else index + 1)


def numbers_of(parts: Iterable[PartInventory]) -> int:
    """Parameters of a model."""
    return sum(numel(part.shapes) for part in parts)


def fit_width(config: TrainingConfig, params: float) -> TrainingConfig:
    """The same model with the width, in whole heads, that brings it nearest to `params` parameters.

    Raises ConfigError where even one head is twice too wide, or nothing is wide enough.
    """
    architecture = config.architecture
    sizes = [numbers_of(take_inventory(_with_heads(config, heads))) for heads in FITTED]
    # parameters are a polynomial of degree two in the width: three sizes tell all others
    square = (sizes[2] - 2 * sizes[1] + sizes[0]) / 2
    linear = sizes[1] - sizes[0] - 3 * square
    constant = sizes[0] - linear - square
    if params < sizes[0] / 2:
        raise ConfigError(
            f"{params:g} parameters are too few for {architecture.parts} blocks of {architecture.layers} layers, "
            f"which have {sizes[0]:,} where they are least wide; give more parameters, or fewer layers"
        )
    root = math.sqrt(linear**2 + 4 * square * max(params - constant, 0.0))
    exact = max((root - linear) / (2 * square), 1.0)
    low, high = int(exact), int(exact) + 1
    heads = min((low, high), key=lambda n: abs(constant + linear * n + square * n * n - params))
    if heads * architecture.head_dim > MAX_WIDTH:
        raise ConfigError(f"{params:g} parameters are too many for layers up to {MAX_WIDTH} wide; give more layers")
    return _with_heads(config, heads)


def _passes(config: TrainingConfig, index: int) -> int:
    a, model = config.architecture, config.rounds.model
    if model == "ar":
        return TRAINED * a.layers * a.parts
    through = len(later(config, index)) if config.lookahead.ahead else 0
    return a.layers * (FORWARD * len(before(config, index)) + TRAINED + THROUGH * through)


def _with_heads(config: TrainingConfig, heads: int) -> TrainingConfig:
    architecture = config.architecture
    return replace(config, architecture=replace(architecture, width=heads * architecture.head_dim, heads=heads))
