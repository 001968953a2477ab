"""The drafter: some of the teacher's layers in one stage, under the teacher's head."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from stages.architecture import Architecture
from stages.errors import ConfigError
from stages.families import PipelineStage, new_stage
from stages.llama.architecture import LlamaArchitecture
from stages.unfilled import without_memory
from trainer.distill.odds import Head
from trainer.distill.teacher import Teacher
from trainer.least_squares import LeastSquares

FIRST_PART = 4
"""One of so many layers under a tied head is one of the model's first, the others are its last."""


class Student:
    """What is trained are the layers, and, where the teacher's head is its own, a lens: a matrix between the last norm
    and the head.

    The teacher's head stays as it is: what the two matrices do is what their product does, and that becomes the
    drafter's head. A head that is tied to the embedding stays tied, for its matrix is worth many layers; then there is
    no lens.
    """

    def __init__(self, teacher: Teacher, layers: Sequence[int]) -> None:
        """Copies of the teacher's `layers`, in float32. Raises ConfigError for those that it does not have."""
        sources = [layer for stage in teacher.stages for layer in stage.layers]
        if not layers or not all(0 <= index < len(sources) for index in layers):
            raise ConfigError(f"--layers {' '.join(map(str, layers))}: the model has layers 0 to {len(sources) - 1}")
        self.architecture = one_stage(teacher.stages[0].architecture, len(layers))
        self.teacher = teacher
        with without_memory():
            self.stage = new_stage(self.architecture, 0)
        self.stage.restore_tables()
        for layer, index in zip(self.stage.layers, layers, strict=True):
            weights = {name: tensor.float().clone() for name, tensor in sources[index].state_dict().items()}
            layer.load_state_dict(weights, assign=True)
        # in float32 too: sums that run along the layers lose what bfloat16 rounds off
        self.stage.embedding, self.stage.norm = deepcopy(teacher.stages[0].embedding), deepcopy(teacher.stages[-1].norm)
        self.stage.head = None
        self.lens = None if is_tied(self.architecture) else _identity(self.architecture.width)
        self.trained = nn.ModuleDict({"layers": self.stage.layers})  # type: ignore[dict-item]
        if self.lens is not None:
            self.trained["lens"] = self.lens
        self.trained.to(teacher.device)
        self.stage.to(device=teacher.device, dtype=torch.float32)

    def read(self, symbols: Tensor) -> Tensor:
        """What the teacher's head is given at every place. symbols: (rows, positions). (rows, positions, width)."""
        normed = self._normed(symbols)
        return normed if self.lens is None else self.lens(normed)

    @torch.no_grad()
    def fit_lens(self, symbols: Tensor, features: Tensor, rows: int) -> None:
        """Set the lens, if there is one, to what maps the layers' output best to the teacher's features, in the least
        squares' sense.

        The tuned lens (arXiv 2303.08112) in closed form: argmin |Z M - T|^2 + r |M - 1|^2, `rows` windows at a time.
        """
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
        """The drafter as one stage of a pipeline, on the CPU in float32; a lens is multiplied into the head."""
        with without_memory():
            stage = new_stage(self.architecture, 0)
        stage.restore_tables()
        embedding, norm = self.stage.embedding, self.stage.norm
        assert embedding is not None
        assert norm is not None
        tensors = {f"layers.{name}": tensor for name, tensor in self.trained["layers"].state_dict().items()}
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


def one_stage(architecture: Architecture | LlamaArchitecture, layers: int) -> Architecture | LlamaArchitecture:
    """The same shapes with so many layers, in one stage."""
    if isinstance(architecture, LlamaArchitecture):
        return replace(architecture, layers=(layers,))
    return replace(architecture, parts=1, layers=layers, context="own")


def is_tied(architecture: Architecture | LlamaArchitecture) -> bool:
    """Whether the head is the embedding's matrix."""
    return isinstance(architecture, LlamaArchitecture) and architecture.tied_head


def numbers_in(architecture: Architecture | LlamaArchitecture, index: int) -> int:
    """Parameters of a stage, the embedding and the head counted where it has them."""
    with without_memory():
        return sum(parameter.numel() for parameter in new_stage(architecture, index).parameters())


def fitting_layers(architecture: Architecture | LlamaArchitecture) -> tuple[int, ...]:
    """As many layers as a drafter can have, one at least, and be no larger than the largest stage.

    The first ones where a lens shows them to the head; under a tied head the first quarter of them, and the model's
    last ones, whose output is what that head reads.
    """
    largest = max(numbers_in(architecture, index) for index in range(architecture.parts))
    total = sum(architecture.layers_in(index) for index in range(architecture.parts))
    fitting = [n for n in range(1, total + 1) if numbers_in(one_stage(architecture, n), 0) <= largest]
    count = max(fitting, default=1)
    first = count // FIRST_PART if is_tied(architecture) else count
    return (*range(first), *range(total - count + first, total))


def _identity(width: int) -> nn.Linear:
    lens = nn.Linear(width, width, bias=False)
    nn.init.eye_(lens.weight)
    return lens


def _seen_through(lens: nn.Linear, head: Head) -> dict[str, Tensor]:
    """The tensors of a head that reads what the lens reads."""
    bias = {} if head.bias is None else {"head.bias": head.bias}
    return {"head.weight": head.weight.float() @ lens.weight.float(), **bias}
