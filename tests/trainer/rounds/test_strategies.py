"""Outer optimizers against torch's own, closed forms and the papers' algorithms written out."""

import pytest
import torch

from tests.trainer.small import tensors
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.codecs import Tensors
from trainer.rounds.ledger import closes_at
from trainer.rounds.merging import outer_step, votes
from trainer.rounds.store import Share


def test_nesterov_matches_torch() -> None:
    settings, momentum = RoundSettings(outer_rate=0.7, outer_momentum=0.9), Tensors()
    theta, begun = tensors(0), digest(tensors(1))
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 6):
        gradient = tensors(step)
        theta, momentum = outer_step(settings, theta, [Share(1.0, gradient)], momentum)
        for name, parameter in theirs.items():
            parameter.grad = gradient[name]
        optimizer.step()
        for name in theta:
            torch.testing.assert_close(theta[name], theirs[name].detach())
    before = digest(theta), digest(momentum)
    outer_step(settings, theta, [Share(1.0, tensors(1)), Share(2.0, tensors(51))], momentum)
    assert (digest(theta), digest(momentum), digest(tensors(1))) == (*before, begun)  # the arguments are not changed


# Deadlines, votes: closed forms.


@pytest.mark.parametrize(
    ("arrivals", "past", "closes"),
    [
        ([], [], 100.0),
        ([10.0, 11.0], [], 100.0),  # two of five are no quorum of 0.6
        ([10.0, 11.0, 12.0], [], 22.0),  # twice the median
        ([10.0, 11.0, 30.0], [], 30.0),  # never before the quorum itself
        ([10.0, 11.0, 12.0], [20.0] * 4, 40.0),
        ([10.0, 11.0, 12.0], [90.0] * 4, 100.0),  # never after the limit
    ],
)
def test_a_round_closes_after_its_quorum_and_a_grace_period(
    arrivals: list[float], past: list[float], closes: float
) -> None:
    assert closes_at(RoundSettings(quorum=0.6, grace=2.0, deadline_s=100.0), arrivals, 5, past) == closes


def shares(*values: float) -> list[Share]:
    return [Share(2.0, {"a": torch.tensor([value, -value])}) for value in values]


def test_a_vote_is_the_mean_of_its_updates_with_the_weight_of_one_round() -> None:
    one, two, three = shares(1.0, 4.0, 7.0)
    eve, bob = votes([("eve", one), ("bob", two), ("eve", three)], 3.0).values()
    assert (eve.weight, bob.weight) == (3.0, 2.0)
    assert (eve.delta["a"].tolist(), bob) == ([4.0, -4.0], two)
