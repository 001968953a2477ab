"""Distances between probs: closed forms, and torch's own divergence with its own gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from trainer.distill import teacher as probs
from trainer.distill.teacher import OutputHead, distance, mean_kl, run_length


@pytest.fixture(params=[1, 1 << 20], ids=["a place at a time", "all at once"])
def head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OutputHead:
    monkeypatch.setattr(probs, "CHUNK_BYTES", request.param)
    return OutputHead(torch.randn(50, 8), torch.randn(50))


def test_the_loss_and_its_gradient_are_those_of_torch(head: OutputHead) -> None:
    student, teacher = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8)
    p, q = (F.linear(x, head.weight, head.bias).log_softmax(-1) for x in (teacher, student))
    expected = F.kl_div(q.flatten(0, 1), p.flatten(0, 1), log_target=True, reduction="batchmean")
    (gradient,) = torch.autograd.grad(3 * expected, student)
    loss = mean_kl(student, head, teacher, head)
    (found,) = torch.autograd.grad(3 * loss, student)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(found, gradient)


def test_a_head_of_the_student_s_own_gets_the_gradient_of_torch(head: OutputHead) -> None:
    teacher = torch.randn(2, 5, 8)
    own = [torch.randn(shape, requires_grad=True) for shape in ((2, 5, 6), (50, 6), (50,))]
    p, q = F.linear(teacher, head.weight, head.bias).log_softmax(-1), F.linear(*own).log_softmax(-1)
    expected = torch.autograd.grad(
        3 * F.kl_div(q.flatten(0, 1), p.flatten(0, 1), log_target=True, reduction="batchmean"), own
    )
    found = torch.autograd.grad(3 * mean_kl(own[0], OutputHead(own[1], own[2]), teacher, head), own)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_distance_is_that_of_its_definition(head: OutputHead) -> None:
    student, teacher = torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    p, q = (F.linear(x, head.weight, head.bias).softmax(-1) for x in (teacher, student))
    found = distance(student, head, teacher, head)
    assert found["kl_bits"] == pytest.approx(float((p * (p / q).log2()).sum(-1).mean()), rel=1e-4)
    assert found["total_variation"] == pytest.approx(float((p - q).abs().sum(-1).mean()) / 2, rel=1e-4)
    assert found["accepted"] == pytest.approx(run_length(torch.minimum(p, q).sum(-1)), rel=1e-4)


def test_the_same_features_are_no_distance_apart(head: OutputHead) -> None:
    features = torch.randn(1, 20, 8)
    assert [*distance(features, head, features, head).values()] == pytest.approx([0, 0, 8], abs=1e-5)


def test_a_run_ends_at_the_first_guess_that_does_not_stand() -> None:
    assert run_length(torch.full((3, 20), 0.5)) == pytest.approx(1 - 0.5**8)
    assert run_length(torch.tensor([[1.0, 1.0, 0.0, 1.0]])) == 2
    assert run_length(torch.ones(1, 4)) == 4, "a text that is shorter than a run"


def test_a_chunk_takes_no_more_than_its_share_and_no_place_is_left_out() -> None:
    head = OutputHead(torch.randn(1 << 20, 1))
    chunks = list(head.chunks(20))
    assert [i for chunk in chunks for i in range(20)[chunk]] == list(range(20))
    assert max(len(range(20)[chunk]) for chunk in chunks) * 4 * len(head.weight) <= probs.CHUNK_BYTES
    assert len(chunks) > 1
