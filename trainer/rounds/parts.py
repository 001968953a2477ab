"""Parts: the training task of one worker, with frozen copies of other parts or the features that they pass on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from stages.errors import CheckpointError, file_errors
from stages.model.codec import FEATURE_LIMIT, Int8
from stages.model.pipeline import ArStage
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.blocks.run import OptimizerSet, StepLoss, Task, train_step
from trainer.blocks.task import ArTask, BlockTask, stage_loss
from trainer.rounds.codecs import Tensors, load, share, trainable

STAGE, AR = "stage", "ar"


@dataclass
class Neighbours:
    """The inputs and outputs of a part whose worker has no copies of earlier parts."""

    # Returns the features (sequences, positions, width) of a step by its number; and receives those that it makes.
    read: Callable[[int], Tensor] | None = None
    send: Callable[[int, Tensor], None] = lambda step, made: None


class PartTask(Task, Protocol):
    """A task trained with published weights of other parts."""

    # Frozen copies of the parts that it reads or looks ahead through, by name.
    copies: Mapping[str, nn.Module]
    neighbours: Neighbours


class BlockPart(BlockTask):
    """A block, which reads nothing from the others."""

    copies: Mapping[str, nn.Module] = {}
    neighbours = Neighbours()


class StagePart:
    """A stage of a scorer, which learns from the last head."""

    def __init__(self, stage: ArStage, copies: Sequence[ArStage], corpus: Corpus, config: TrainingConfig) -> None:
        """:param copies: of the later stages and, unless it is fed, of the earlier ones, in order."""
        self.module = stage.to(corpus.device)
        self.name = stage_name(stage.index)
        self.before = [copy.requires_grad_(False) for copy in copies if copy.index < stage.index]
        self.later = [copy.requires_grad_(False) for copy in copies if copy.index > stage.index]
        self.copies: Mapping[str, nn.Module] = {stage_name(copy.index): copy.to(corpus.device) for copy in copies}
        self.neighbours = Neighbours()
        self.corpus, self.config, self.trained = corpus, config, [stage]
        self.length = stage.architecture.context_length

    def loss(self, step: int) -> StepLoss:
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        hidden = self.module.read(self._read(step, text[:, :-1]))
        self.neighbours.send(step, hidden)
        nats = stage_loss(self.module, self.later, hidden, text)
        return StepLoss(nats, {"next_byte_nats": float(nats.detach())})

    def _read(self, step: int, known: Tensor) -> Tensor:
        if self.neighbours.read is not None:
            return self.neighbours.read(step).to(known.device)
        with torch.no_grad():
            for frozen in self.before:
                known = frozen.read(known)
        return known

    def evaluate(self) -> dict[str, float]:
        """Nothing: a pipeline is measured only at its end."""
        return {}


class ArPart(ArTask):
    """A whole AR model as one part: plain DiLoCo."""

    copies: Mapping[str, nn.Module] = {}
    neighbours = Neighbours()


def load_copies(part: PartTask, published: Mapping[str, Tensors]) -> None:
    """Load newer weights into all of a part's copies."""
    for name, copy in part.copies.items():
        share(copy, published[name])


def stage_name(index: int) -> str:
    return f"{STAGE}-{index}"


class Learner:
    """Trains a part, keeping the inner optimizer's state between rounds, as DiLoCo does (arXiv 2311.08105)."""

    def __init__(self, part: PartTask, config: TrainingConfig) -> None:
        """:param config: `settled`, so its `steps` are those of the whole run."""
        self.part, self.config = part, config
        self.optimizers = OptimizerSet(part.module, config)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        load(self.part.module, weights)

    def train(
        self, first: int, steps: int, exchange: Callable[[nn.Module], None] = lambda module: None
    ) -> dict[str, float]:
        """Do `steps` local steps, starting with number `first` of the run; returns the last one's losses.

        :param exchange: may change the gradients. Raises ConfigError for a gradient that is not finite.
        """
        record = dict[str, float]()
        for step in range(first, first + steps):
            record = train_step(self.part, self.optimizers, self.config, step, exchange=exchange)
        return record

    def weights(self) -> Tensors:
        """A copy, in float32 on the CPU."""
        return trainable(self.part.module)


CODEC = Int8()  # one scale per position, as between hosts
FEATURES = "features-"  # with a round number, the name of its file


@dataclass(frozen=True)
class FeatureFormat:
    """The file of a round's features: one codec payload per local step, in order."""

    steps: int
    sequences: int
    positions: int
    width: int

    @classmethod
    def of(cls, config: TrainingConfig) -> Self:
        a = config.architecture
        return cls(config.rounds.steps_per_round, config.sequences, a.context_length, a.width)

    @property
    def step_bytes(self) -> int:
        return CODEC.size(self.sequences * self.positions, self.width)

    @property
    def size(self) -> int:
        return self.steps * self.step_bytes

    def encode(self, features: Tensor) -> bytes:
        """features: one step's, (sequences, positions, width)."""
        return CODEC.encode(features.detach().float().cpu().flatten(0, 1))

    def decode(self, payload: bytes) -> Tensor:
        """One step's features, (sequences, positions, width) float32. Raises CodecError."""
        rows = CODEC.decode(payload, self.sequences * self.positions, self.width, FEATURE_LIMIT)
        return rows.view(self.sequences, self.positions, self.width)


def reads_features(config: TrainingConfig, index: int) -> bool:
    """True if part `index` reads features from the worker of the previous part."""
    return config.rounds.by_features and index > 0


def sends_features(config: TrainingConfig, index: int) -> bool:
    """True if the worker of part `index` passes its features on."""
    return config.rounds.by_features and index < config.architecture.parts - 1


def tidy(directory: Path, names: str, oldest: int) -> None:
    """Create a directory of feature files, and remove the `names` of rounds before `oldest`. Raises CheckpointError."""
    with file_errors(CheckpointError, f"cannot write {directory}"):
        directory.mkdir(exist_ok=True)
        for path in directory.glob(names):
            if int(path.name.rpartition("-")[2]) < oldest:
                path.unlink(missing_ok=True)
