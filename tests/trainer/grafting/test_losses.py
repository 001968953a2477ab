from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stages.grafting.head import ROWS, Evidence, Head
from trainer.grafting.losses import losses


@pytest.fixture
def head() -> Head:
    return Head(torch.randn(50, 6), F.normalize(torch.randn(50, 4)), torch.randn(50))


def evidence(rows: int) -> Evidence:
    return Evidence(torch.randn(rows, 4), torch.rand(rows, 1) + 0.5)


@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 3])
def test_losses_and_gradient_are_those_of_all_odds_at_once(head: Head, rows: int) -> None:
    said, target, weights = evidence(rows), torch.randint(50, (rows,)), torch.rand(rows)
    ours = torch.randn(rows, 6, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    logits = theirs @ head.weight.T + head.bias + said.z @ head.codes.T / said.sigma**2
    expected = F.cross_entropy(logits, target, reduction="none")
    found = losses(head, ours, target, said)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert found.shape == (rows,)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(head.logits(ours, said), logits)
    torch.testing.assert_close(head.points(ours, said), logits.softmax(dim=1) @ head.codes)


def test_a_colder_point_is_nearer_to_the_likeliest_code(head: Head) -> None:
    hidden, said = torch.randn(3, 6), evidence(3)
    best = head.codes[head.logits(hidden, said).argmax(dim=1)]
    torch.testing.assert_close(head.points(hidden, said, 1e-4), best)


def test_the_evidence_is_the_log_likelihood_up_to_a_constant(head: Head) -> None:
    said = evidence(2)
    likelihood = -((said.z[:, None] - head.codes) ** 2).sum(dim=2) / (2 * said.sigma**2)
    difference = said.at(slice(0, 2), head.codes) - likelihood
    torch.testing.assert_close(difference, difference[:, :1].expand_as(difference), atol=1e-4, rtol=1e-4)
