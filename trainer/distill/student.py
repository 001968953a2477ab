"""The drafter in training: some of the teacher's layers under the teacher's head, or a drafter that exists."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from stages.model.architecture import Architecture, LlamaArchitecture
from stages.model.pipeline import PipelineStage, new_stage, without_memory
from trainer.blocks.run import StepLoss
from trainer.distill.teacher import OutputHead, Samples, Teacher, distance, mean_kl

# Under a tied head a quarter of the layers are the model's first, the rest its last, whose output that head reads. Of
# SmolLM2-135M, untrained (bits of KL from the model): layers 0 to 3 with 22 to 29 7.2, 0 to 5 with 24 to 29 8.2, 0 to 8
# with the last three 12.7, evenly spread ones 11.7.
FIRST_SHARE = 4
RIDGE = 1e-3  # share of the mean square of what is known that keeps directions which hardly occur from being trusted


class Student:
    """A model of one stage, some of the teacher's layers or a drafter that exists, which learns its probabilities."""

    def __init__(
        self,
        teacher: Teacher,
        stage: PipelineStage,
        trained: nn.Module,
        head: OutputHead | None = None,
        lens: nn.Linear | None = None,
    ) -> None:
        """:param trained: all that is trained, named as OptimizerSet expects.
        :param head: which stays as it is; None for the stage's own.
        :param lens: a matrix between norm and head.
        """
        self.teacher, self.trained, self.lens = teacher, trained.to(teacher.device), lens
        self.stage = stage.to(device=teacher.device, dtype=torch.float32)
        self.head = head or OutputHead.of(stage)

    # Of the shipped weights, 449 steps of 2,048 tokens in float32: a `local` trained on text goes from 0.305 nats of KL
    # to 0.208. Two layers of the scorer and a lens are at 0.32 after 740 such steps.

    # A head tied to the embedding stays tied: one of its own costs SmolLM2-135M's drafter 28.3 million numbers, eight
    # layers. At equal training time the tied drafter of twelve layers has 2.90 bits of KL, one of four and a lens 3.14.

    @staticmethod
    def of_layers(teacher: Teacher, layers: Sequence[int]) -> Student:
        """Copies of the teacher's `layers` and, where its head is not its embedding, a lens; under the teacher's head,
        whose product with the lens becomes the drafter's."""
        sources = [layer for stage in teacher.stages for layer in stage.layers]
        architecture = one_stage(teacher.stages[0].architecture, layers)
        with without_memory():
            stage = new_stage(architecture, 0)
        stage.restore_tables()
        for layer, index in zip(stage.layers, layers, strict=True):
            weights = {name: tensor.float().clone() for name, tensor in sources[index].state_dict().items()}
            layer.load_state_dict(weights, assign=True)
        # In float32 too: sums that run along the layers lose what bfloat16 rounds off.
        stage.embedding, stage.norm = deepcopy(teacher.stages[0].embedding), deepcopy(teacher.stages[-1].norm)
        stage.head = None
        lens = None
        if not is_tied(architecture):
            lens = nn.Linear(architecture.width, architecture.width, bias=False)
            nn.init.eye_(lens.weight)
        modules: nn.Module = stage.layers  # type: ignore[assignment]
        trained = nn.ModuleDict({"layers": modules} | ({} if lens is None else {"lens": lens}))
        return Student(teacher, stage, trained, teacher.head, lens)

    def read(self, tokens: Tensor) -> Tensor:
        """The head's input, (rows, positions, width). tokens: (rows, positions)."""
        normed = self._normed(tokens)
        return normed if self.lens is None else self.lens(normed)

    @torch.no_grad()
    def begin(self, tokens: Tensor, features: Tensor, rows: int) -> None:
        """Set the lens, if there is one, to what maps the layers' output best to the teacher's features of some text,
        in the least squares' sense."""
        # The tuned lens (arXiv 2303.08112) in closed form: argmin |Z M - T|^2 + r |M - 1|^2, `rows` windows at a time.
        if self.lens is None:
            return
        width = self.stage.architecture.width
        one = torch.eye(width, dtype=torch.float64, device=self.lens.weight.device)
        squares, products = torch.zeros_like(one), torch.zeros_like(one)
        for known, seen in zip(tokens.split(rows), features.split(rows), strict=True):
            z = self._normed(known).reshape(-1, width).double()
            squares += z.T @ z
            products += z.T @ (seen.reshape(-1, width).double() - z)
        ridge = RIDGE * float(squares.diagonal().mean())
        self.lens.weight.copy_(torch.linalg.solve(squares + ridge * one, products).T + one)

    @torch.no_grad()
    def stage_alone(self) -> PipelineStage:
        """The drafter as one stage of a pipeline, on the CPU in float32; a lens is multiplied into the head."""
        with without_memory():
            stage = new_stage(self.stage.architecture, 0)
        stage.restore_tables()
        tensors = self.stage.state_dict()
        if self.lens is not None:
            tensors["head.weight"] = self.head.weight.float() @ self.lens.weight.float()
            if self.head.bias is not None:
                tensors["head.bias"] = self.head.bias
        copies = {name: tensor.float().cpu().clone() for name, tensor in tensors.items()}
        stage.load_state_dict(copies, assign=True)
        return stage.eval().requires_grad_(False)

    def _normed(self, tokens: Tensor) -> Tensor:
        assert self.stage.norm is not None
        normed: Tensor = self.stage.norm(self.stage.read(tokens.to(self.teacher.device)))
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


class DistillTask:
    """KL(teacher || student) at temperature 1 on full distributions, at every position of a batch."""

    name = "distill"

    def __init__(self, student: Student, samples: Samples) -> None:
        self.student, self.samples, self.held_out = student, samples, samples.held_out()
        self.teacher = samples.teacher
        self.module: nn.Module = student.trained
        self.trained = [self.module]

    def loss(self, step: int) -> StepLoss:
        tokens, features = self.samples.batch(step)
        seen = features.to(self.teacher.device)
        loss = mean_kl(self.student.read(tokens), self.student.head, seen, self.teacher.head)
        return StepLoss(loss, {"kl_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        """Distances from the teacher on held-out text, by names such as `text_kl_bits`."""
        found, device, head = dict[str, float](), self.teacher.device, self.teacher.head
        for name, (tokens, features) in self.held_out.items():
            rows = [
                distance(self.student.read(known[None]), self.student.head, seen[None].to(device), head)
                for known, seen in zip(tokens, features, strict=True)
            ]
            found |= {f"{name}_{measure}": sum(row[measure] for row in rows) / len(rows) for measure in rows[0]}
        return found
