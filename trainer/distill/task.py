"""What a run of the distillation does in a step, and what it measures."""

from __future__ import annotations

from dataclasses import asdict

from torch import Tensor, nn

from trainer.distill.odds import distance, divergence
from trainer.distill.samples import Samples
from trainer.distill.student import Student
from trainer.run import StepLoss


class DistillTask:
    """KL(teacher || student) at temperature 1 on full distributions, at every place of a batch."""

    name = "distill"

    def __init__(self, student: Student, samples: Samples, held_out: dict[str, tuple[Tensor, Tensor]]) -> None:
        """:param held_out: name -> symbols (rows, window) and the teacher's features of them."""
        self.student, self.samples, self.held_out = student, samples, held_out
        self.module: nn.Module = student.trained
        self.trained = [self.module]
        self.head = student.teacher.head

    def loss(self, step: int) -> StepLoss:
        symbols, features = self.samples.batch(step)
        loss = divergence(self.student.read(symbols), features.to(self.student.teacher.device), self.head)
        return StepLoss(loss, {"kl_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        """Distances from the teacher on held-out text, by names such as `text_kl_bits`."""
        found = {}
        for name, (symbols, features) in self.held_out.items():
            rows = [
                distance(self.student.read(known[None]), seen[None].to(self.student.teacher.device), self.head)
                for known, seen in zip(symbols, features, strict=True)
            ]
            for measure in asdict(rows[0]):
                found[f"{name}_{measure}"] = sum(getattr(row, measure) for row in rows) / len(rows)
        return found
