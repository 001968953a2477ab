"""How far a drafter's odds are from its teacher's, place by place, without ever holding those of all places.

Both are of the same head over features: odds(x) = softmax(head(features)). A chunk of places at a time, the head is
multiplied with, what is wanted is taken, and the columns are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 25 << 20
"""Of the logits of a chunk, in float32: what stays in a processor's cache is not fetched over and over."""
DRAFT = 8
"""Guesses in a run, for the figure of how many of them are accepted."""


@dataclass(frozen=True)
class Head:
    """The teacher's last matrix, frozen."""

    weight: Tensor
    """(vocabulary, width), in the type that products are computed in."""
    bias: Tensor | None = None

    def logits(self, features: Tensor) -> Tensor:
        """features: (places, width). Returns (places, vocabulary) float32."""
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias).float()

    def chunks(self, places: int) -> Iterator[slice]:
        size = max(1, CHUNK_BYTES // (4 * len(self.weight)))
        return (slice(begin, begin + size) for begin in range(0, places, size))


class _Divergence(torch.autograd.Function):
    """Mean KL(teacher || student) in nats, whose gradient towards the student's features is made on the way:
    d KL / d logits = q - p."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Head) -> Tensor:  # noqa: ANN401
        gradient, total = torch.empty_like(student), student.new_zeros((), dtype=torch.float32)
        for chunk in head.chunks(len(student)):
            log_p = head.logits(teacher[chunk]).log_softmax(-1)
            log_q = head.logits(student[chunk]).log_softmax(-1)
            p = log_p.exp()
            total += log_p.sub_(log_q).mul_(p).sum()
            difference = log_q.exp_().sub_(p)
            gradient[chunk] = (difference.to(head.weight.dtype) @ head.weight).to(gradient.dtype)
        ctx.save_for_backward(gradient.div_(len(student)))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None


def divergence(student: Tensor, teacher: Tensor, head: Head) -> Tensor:
    """Mean KL(teacher || student) in nats a place, differentiable by `student`. Both: (..., width) features."""
    width = student.shape[-1]
    result: Tensor = _Divergence.apply(student.reshape(-1, width), teacher.reshape(-1, width), head)
    return result


@dataclass(frozen=True)
class Distance:
    """Means over places of some text; p is the teacher, q the drafter, both at temperature 1."""

    kl_bits: float
    """KL(p || q)."""
    total_variation: float
    """What share of guesses is refused."""
    accepted: float
    """Guesses that stand of a run of 8, drawn from q where p follows."""


def distance(student: Tensor, teacher: Tensor, head: Head) -> Distance:
    """Both: (rows, positions, width) features of the same text."""
    rows, positions, width = student.shape
    kl, stays = torch.empty(rows * positions), torch.empty(rows * positions)
    flat_student, flat_teacher = student.reshape(-1, width), teacher.reshape(-1, width)
    for chunk in head.chunks(rows * positions):
        log_p, log_q = (head.logits(x[chunk]).log_softmax(-1) for x in (flat_teacher, flat_student))
        p = log_p.exp()
        kl[chunk] = (p * (log_p - log_q)).sum(-1).cpu()
        stays[chunk] = torch.minimum(p, log_q.exp()).sum(-1).cpu()
    return Distance(float(kl.mean()) / math.log(2), 1 - float(stays.mean()), run_length(stays.view(rows, positions)))


def run_length(stays: Tensor, count: int = DRAFT) -> float:
    """Mean number of guesses that stand of `count` in a row. stays: (rows, positions), odds that a guess stands.

    From every place where a whole run fits: sum over k of the product of the first k odds (arXiv 2211.17192, eq. 1,
    with every place's own odds in place of their mean).
    """
    count = min(count, stays.shape[1])
    return float(stays.unfold(1, count, 1).cumprod(-1).sum(-1).mean())
