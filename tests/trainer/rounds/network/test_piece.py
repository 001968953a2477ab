"""A worker's fragment: what its overlap is told."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.rounds.piece import Piece
from trainer.rounds.settings import RoundSettings
from trainer.rounds.tensors import Tensors, scale, shapes, subtract


def test_a_round_that_is_given_up_does_not_count_the_one_before_twice(tensors: Callable[..., Tensors]) -> None:
    base, learned = tensors(0), scale(tensors(1), 0.1)
    piece = Piece(0, "p", shapes(base), RoundSettings(overlap="eager", outer_momentum=0.5, codec="fp32"))
    piece.begin(0, 0, base)
    piece.finish(subtract(base, learned), 2, {}, "run w")
    piece.begin(1, 0, base)
    momentum = piece.overlap.state()
    assert all(torch.allclose(momentum[name], tensor, atol=1e-6) for name, tensor in learned.items())
    piece.give_up()
    begun = piece.begin(5, 5, base)
    assert all(torch.equal(piece.overlap.state()[name], tensor) for name, tensor in momentum.items())
    assert all(torch.equal(begun[name], tensor) for name, tensor in base.items())
