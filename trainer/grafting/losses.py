"""Losses under a frozen head, without ever holding the odds of all positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stages.grafting.head import Evidence, Head


def losses(head: Head, hidden: Tensor, target: Tensor, evidence: Evidence | None = None) -> Tensor:
    """Cross-entropy of each position in nats: (positions,). Carries gradient to `hidden` only.

    hidden: (positions, width), normed; target: (positions,) int64.
    """
    found: Tensor = _Losses.apply(hidden, head, target, evidence)
    return found


class _Losses(torch.autograd.Function):
    """The head is frozen, so its gradient can be taken at once, while a piece's odds are there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, target: Tensor, evidence: Evidence | None) -> Tensor:  # noqa: ANN401
        nats, gradients = [], []
        for rows, logits in head.pieces(hidden, evidence):
            odds = logits.log_softmax(dim=1)
            index = target[rows, None]
            nats.append(-odds.gather(1, index)[:, 0])
            if ctx.needs_input_grad[0]:
                change = odds.exp_()
                change.scatter_add_(1, index, -torch.ones_like(index, dtype=change.dtype))
                gradients.append((change.to(head.weight.dtype) @ head.weight).to(hidden.dtype))
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(nats)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0][:, None].to(gradient.dtype), None, None, None
