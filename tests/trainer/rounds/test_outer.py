"""Outer optimizers against torch's own, closed forms and the papers' algorithms written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.rounds.merge import weighted_mean
from trainer.rounds.outer import new_outer
from trainer.rounds.outer.delayed import Delayed
from trainer.rounds.outer.radial import Radial
from trainer.rounds.overlap.eager import Eager
from trainer.rounds.overlap.naive import Naive
from trainer.rounds.overlap.none import Waiting
from trainer.rounds.settings import OuterName, RoundSettings
from trainer.rounds.tensors import Tensors, add, digest, scale, subtract
from trainer.rounds.update import Share

Make = Callable[..., Tensors]


def test_the_mean_is_weighted_by_work(tensors: Make) -> None:
    a, b = tensors(1), tensors(2)
    mean = weighted_mean([Share(3.0, a), Share(1.0, b)])
    for name in a:
        torch.testing.assert_close(mean[name], 0.75 * a[name] + 0.25 * b[name])


def test_mean_goes_where_the_workers_are_on_average(tensors: Make) -> None:
    theta, trained = tensors(0), [tensors(1), tensors(2)]
    stepped = new_outer(RoundSettings(outer="mean")).step(theta, [Share(1.0, subtract(theta, t)) for t in trained])
    for name in theta:
        torch.testing.assert_close(stepped[name], (trained[0][name] + trained[1][name]) / 2)


def test_nesterov_is_torchs(tensors: Make) -> None:
    theta, outer = tensors(0), new_outer(RoundSettings(outer="nesterov", outer_rate=0.7, outer_momentum=0.9))
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 6):
        gradient = tensors(step)
        theta = outer.step(theta, [Share(1.0, gradient)])
        for name, parameter in theirs.items():
            parameter.grad = gradient[name]
        optimizer.step()
        for name in theta:
            torch.testing.assert_close(theta[name], theirs[name].detach())


@pytest.mark.parametrize("name", ["mean", "nesterov", "delayed", "radial"])
def test_state_that_is_restored_goes_on_the_same(name: OuterName, tensors: Make) -> None:
    settings = RoundSettings(outer=name, momentum_every=2)
    one = new_outer(settings)
    theta = tensors(0)
    for step in range(1, 4):
        theta = one.step(theta, [Share(1.0, tensors(step))])
    other = new_outer(settings)
    other.restore({key: tensor.clone() for key, tensor in one.state().items()})
    before = digest(theta)
    for step in range(4, 8):
        shares = [Share(1.0, tensors(step)), Share(2.0, tensors(step + 50))]
        assert digest(one.step(theta, shares)) == digest(other.step(theta, shares))
    assert digest(theta) == before  # what is given is not changed


def test_delayed_with_one_is_nesterov(tensors: Make) -> None:
    a, b = Delayed(0.5, 0.8, 1), new_outer(RoundSettings(outer="nesterov", outer_rate=0.5, outer_momentum=0.8))
    x = y = tensors(0)
    for step in range(1, 5):
        x, y = a.step(x, [Share(1.0, tensors(step))]), b.step(y, [Share(1.0, tensors(step))])
    for name in x:
        torch.testing.assert_close(x[name], y[name])


def test_delayed_is_the_papers_algorithm(tensors: Make) -> None:
    rate, momentum, every = 0.5, 0.8, 3
    ours, theta = Delayed(rate, momentum, every), tensors(0)
    expected, m, collected = theta, scale(theta, 0.0), scale(theta, 0.0)
    for step in range(7):
        gradient = tensors(step + 1)
        theta = ours.step(theta, [Share(1.0, gradient)])
        collected = add(collected, gradient)
        if (step + 1) % every == 0:
            m = add(scale(m, momentum), collected, 1 / every)
            expected = add(expected, add(gradient, m, momentum), -rate)
            collected = scale(collected, 0.0)
        else:
            expected = add(expected, gradient, -rate)
        for name in theta:
            torch.testing.assert_close(theta[name], expected[name])


def test_radial_keeps_the_length_that_a_mean_loses() -> None:
    radial = Radial(1.0, 0.0)
    across = [Share(1.0, {"a": torch.tensor([2.0, 0.0])}), Share(1.0, {"a": torch.tensor([0.0, 4.0])})]
    torch.testing.assert_close(radial.merge(across)["a"], torch.tensor([3.0, 3.0]) / 2**0.5)
    alike = [Share(1.0, {"a": torch.tensor([2.0, 0.0])}), Share(3.0, {"a": torch.tensor([4.0, 0.0])})]
    torch.testing.assert_close(radial.merge(alike)["a"], torch.tensor([3.5, 0.0]))
    apart = [Share(1.0, {"a": torch.tensor([2.0, 0.0])}), Share(1.0, {"a": torch.tensor([-2.0, 0.0])})]
    assert torch.equal(radial.merge(apart)["a"], torch.zeros(2))
    assert torch.equal(radial.merge([Share(1.0, {"a": torch.zeros(2)})])["a"], torch.zeros(2))


@pytest.mark.parametrize(("outer", "rate", "momentum"), [("nesterov", 0.7, 0.9), ("mean", 1.0, 0.0)])
def test_eager_is_the_papers_algorithm(outer: OuterName, rate: float, momentum: float, tensors: Make) -> None:
    """Each worker of the paper steps weights of its own with (own now + the others' before) / M."""
    workers, settings = 3, RoundSettings(outer=outer, outer_rate=rate, outer_momentum=momentum)
    common, ours = new_outer(settings), [Eager(rate, momentum, workers) for _ in range(workers)]
    theirs = [new_outer(settings) for _ in range(workers)]
    version, chains, before = tensors(0), [tensors(0)] * workers, None
    for step in range(5):
        deltas = [tensors(10 * step + worker + 1) for worker in range(workers)]
        if before is not None:  # the round before arrives, at all
            version = common.step(version, [Share(1.0, delta) for delta in before])
        for worker, own in enumerate(deltas):
            mixed = scale(own, 1 / workers)
            for other in range(workers):
                if other != worker and before is not None:
                    mixed = add(mixed, before[other], 1 / workers)
            chains[worker] = theirs[worker].step(chains[worker], [Share(1.0, mixed)])
            start = ours[worker].start(version, own, merged=False)
            for name in start:
                torch.testing.assert_close(start[name], chains[worker][name], rtol=1e-4, atol=1e-4)
        before = deltas


def test_who_overlaps_starts_from_the_newest_version(tensors: Make) -> None:
    assert Waiting().waits
    assert not Naive().waits
    assert Naive().start(tensors(0), tensors(1), merged=False).keys() == tensors(0).keys()
    eager = Eager(0.7, 0.9, 2)
    assert digest(eager.start(tensors(0), None, merged=False)) == digest(tensors(0))
    assert digest(eager.start(tensors(0), tensors(1), merged=True)) == digest(tensors(0))
    assert digest(eager.state()) == digest(tensors(1))
