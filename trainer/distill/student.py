"""The drafter in training: some of the teacher's layers under the teacher's head, or a drafter that exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.families import PipelineStage, new_stage, without_memory
from onesweep.stages.model.llama import LlamaArchitecture
from onesweep.trainer.blocks.optimizer import LeastSquares
from onesweep.trainer.blocks.run import StepLoss
from onesweep.trainer.distill.samples import Samples
from onesweep.trainer.distill.teacher import OutputHead, Teacher, distance, mean_kl

# Under a tied head a quarter of the layers are the model's first, the rest its last, whose output that head reads. Of
# SmolLM2-135M, untrained (bits of KL from the model): layers 0 to 3 with 22 to 29 7.2, 0 to 5 with 24 to 29 8.2, 0 to 8
# with the last three 12.7, evenly spread ones 11.7.
FIRST_SHARE = 4


class Student(ABC):
    """A model of one stage that learns its teacher's odds."""

    trained: nn.Module  # all that is trained, named as OptimizerSet expects

    @property
    @abstractmethod
    def head(self) -> OutputHead: ...

    @abstractmethod
    def read(self, symbols: Tensor) -> Tensor:
        """The head's input, (rows, positions, width). symbols: (rows, positions)."""

    @abstractmethod
    def begin(self, symbols: Tensor, features: Tensor, rows: int) -> None:
        """Take a first look at some text and the teacher's features of it, `rows` windows at a time."""

    @abstractmethod
    def stage_alone(self) -> PipelineStage:
        """The drafter as one stage of a pipeline, on the CPU in float32."""


class StartedStudent(Student):
    """Continues a drafter that exists: all its numbers are trained, head and embedding too."""

    # Of the shipped weights, 449 steps of 2,048 tokens in float32: a `local` trained on text goes from 0.305 nats of KL
    # to 0.208. Two layers of the scorer and a lens are at 0.32 after 740 such steps.

    def __init__(self, teacher: Teacher, stage: PipelineStage) -> None:
        """stage: is trained in place, on the teacher's device."""
        self.device = teacher.device
        self.trained = self.stage = stage.to(teacher.device, torch.float32).requires_grad_(True)

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.stage)

    def read(self, symbols: Tensor) -> Tensor:
        assert self.stage.norm is not None
        features: Tensor = self.stage.norm(self.stage.read(symbols.to(self.device)))
        return features

    def begin(self, symbols: Tensor, features: Tensor, rows: int) -> None:
        """Do nothing: it is trained already."""

    def stage_alone(self) -> PipelineStage:
        return deepcopy(self.stage).cpu().eval().requires_grad_(False)


class LayersStudent(Student):
    """Trains the layers, and, where the teacher's head is not its embedding, a lens: a matrix between norm and head."""

    # The teacher's head stays frozen; its product with the lens becomes the drafter's head.

    # A head tied to the embedding stays tied: one of its own costs SmolLM2-135M's drafter 28.3 million numbers, eight
    # layers. At equal training time the tied drafter of twelve layers has 2.90 bits of KL, one of four and a lens 3.14.

    def __init__(self, teacher: Teacher, layers: Sequence[int]) -> None:
        """Copies of the teacher's `layers`, in float32."""
        sources = [layer for stage in teacher.stages for layer in stage.layers]
        self.architecture = one_stage(teacher.stages[0].architecture, layers)
        self.teacher = teacher
        with without_memory():
            self.stage = new_stage(self.architecture, 0)
        self.stage.restore_tables()
        for layer, index in zip(self.stage.layers, layers, strict=True):
            weights = {name: tensor.float().clone() for name, tensor in sources[index].state_dict().items()}
            layer.load_state_dict(weights, assign=True)
        # In float32 too: sums that run along the layers lose what bfloat16 rounds off.
        self.stage.embedding, self.stage.norm = deepcopy(teacher.stages[0].embedding), deepcopy(teacher.stages[-1].norm)
        self.stage.head = None
        self.lens = None if is_tied(self.architecture) else _identity(self.architecture.width)
        self.layers: nn.Module = self.stage.layers  # type: ignore[assignment]
        self.trained = nn.ModuleDict({"layers": self.layers} | ({} if self.lens is None else {"lens": self.lens}))
        self.trained.to(teacher.device)
        self.stage.to(device=teacher.device, dtype=torch.float32)

    @property
    def head(self) -> OutputHead:
        return self.teacher.head

    def read(self, symbols: Tensor) -> Tensor:
        normed = self._normed(symbols)
        return normed if self.lens is None else self.lens(normed)

    @torch.no_grad()
    def begin(self, symbols: Tensor, features: Tensor, rows: int) -> None:
        """Set the lens, if there is one, to what maps the layers' output best to the teacher's features, in the least
        squares' sense."""
        # The tuned lens (arXiv 2303.08112) in closed form: argmin |Z M - T|^2 + r |M - 1|^2, `rows` windows at a time.
        if self.lens is None:
            return
        width, device = self.architecture.width, self.lens.weight.device
        fit = LeastSquares(width, width, device=device)
        for known, seen in zip(symbols.split(rows), features.split(rows), strict=True):
            z = self._normed(known).reshape(-1, width).double()
            fit.add(z, seen.reshape(-1, width).double() - z)
        self.lens.weight.copy_(fit.solve().T + torch.eye(width, device=device))

    @torch.no_grad()
    def stage_alone(self) -> PipelineStage:
        """The base class's; a lens is multiplied into the head."""
        with without_memory():
            stage = new_stage(self.architecture, 0)
        stage.restore_tables()
        embedding, norm = self.stage.embedding, self.stage.norm
        assert embedding is not None
        assert norm is not None
        tensors = {f"layers.{name}": tensor for name, tensor in self.layers.state_dict().items()}
        tensors |= {"embedding.weight": embedding.weight, "norm.weight": norm.weight}
        if self.lens is not None:
            tensors |= _seen_through(self.lens, self.teacher.head)
        stage.load_state_dict({name: tensor.float().cpu() for name, tensor in tensors.items()}, assign=True)
        return stage.eval().requires_grad_(False)

    def _normed(self, symbols: Tensor) -> Tensor:
        norm = self.stage.norm
        assert norm is not None
        normed: Tensor = norm(self.stage.read(symbols.to(self.teacher.device)))
        return normed


def one_stage(
    architecture: Architecture | LlamaArchitecture, layers: Sequence[int]
) -> Architecture | LlamaArchitecture:
    """The same shapes with these of the layers, in one stage."""
    if not isinstance(architecture, LlamaArchitecture):
        return replace(architecture, parts=1, layers=len(layers))
    window = architecture.window
    if window is not None:
        sliding = tuple(i for i, number in enumerate(layers) if architecture.slides(number))
        window = replace(window, layers=sliding) if sliding else None
    return replace(architecture, layers=(len(layers),), window=window)


def is_tied(architecture: Architecture | LlamaArchitecture) -> bool:
    """True if the head is the embedding's matrix."""
    return isinstance(architecture, LlamaArchitecture) and architecture.tied_head


def numbers_in(architecture: Architecture | LlamaArchitecture, index: int) -> int:
    """Parameters of a stage, with the embedding and the head if it has them."""
    with without_memory():
        return sum(parameter.numel() for parameter in new_stage(architecture, index).parameters())


def fitting_layers(architecture: Architecture | LlamaArchitecture) -> tuple[int, ...]:
    """As many layers as fit into the size of the largest stage, at least one: the first ones, or with a tied head some
    of the first and the last."""
    # With a lens the model's last layers cost more than they bring: untrained, layers 0 to 3 are 3.66 bits of KL from
    # SmolLM2-135M, 0 to 2 with the last one 4.35; without the lens 34.9.
    largest = max(numbers_in(architecture, index) for index in range(architecture.parts))
    total = sum(architecture.layers_in(index) for index in range(architecture.parts))
    fitting = [n for n in range(1, total + 1) if numbers_in(one_stage(architecture, range(n)), 0) <= largest]
    count = max(fitting, default=1)
    first = count // FIRST_SHARE if is_tied(architecture) else count
    return (*range(first), *range(total - count + first, total))


def _identity(width: int) -> nn.Linear:
    lens = nn.Linear(width, width, bias=False)
    nn.init.eye_(lens.weight)
    return lens


def _seen_through(lens: nn.Linear, head: OutputHead) -> dict[str, Tensor]:
    """The tensors of the lens and the head multiplied together."""
    bias = {} if head.bias is None else {"head.bias": head.bias}
    return {"head.weight": head.weight.float() @ lens.weight.float(), **bias}


class DistillTask:
    """KL(teacher || student) at temperature 1 on full distributions, at every position of a batch."""

    name = "distill"

    def __init__(self, student: Student, samples: Samples, held_out: dict[str, tuple[Tensor, Tensor]]) -> None:
        """held_out: name -> symbols (rows, window) and the teacher's features of them."""
        self.student, self.samples, self.held_out = student, samples, held_out
        self.teacher = samples.teacher
        self.module: nn.Module = student.trained
        self.trained = [self.module]

    def loss(self, step: int) -> StepLoss:
        symbols, features = self.samples.batch(step)
        seen = features.to(self.teacher.device)
        loss = mean_kl(self.student.read(symbols), self.student.head, seen, self.teacher.head)
        return StepLoss(loss, {"kl_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        """Distances from the teacher on held-out text, by names such as `text_kl_bits`."""
        found = {}
        for name, (symbols, features) in self.held_out.items():
            rows = [
                distance(
                    self.student.read(known[None]),
                    self.student.head,
                    seen[None].to(self.teacher.device),
                    self.teacher.head,
                )
                for known, seen in zip(symbols, features, strict=True)
            ]
            for measure in asdict(rows[0]):
                found[f"{name}_{measure}"] = sum(getattr(row, measure) for row in rows) / len(rows)
        return found
