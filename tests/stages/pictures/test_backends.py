"""Backends that draw: they compute what the loaded part computes, and a picture does not depend on its company."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.backends import Backend
from stages.backends.base import PictureRunner
from stages.backends.pictures import PackedPictures
from stages.backends.runner_checks import checked
from stages.pictures.part import PicturePart
from stages.pictures.trajectory import PicturePiece
from tests.stages.pictures.tiny import TINY, tiny_part

LARGER = replace(TINY, height=32, width=32, channels=3, patch=4, features=48, heads=3, layers=2)
# Parts that read patches and have a head, read patches only, have neither, and have a head only.
PARTS = [("chain", 1), ("steps", 0), ("steps", 1), ("steps", 2)]


def piece(part: PicturePart, pictures: int, sigma: float, seed: int = 0) -> PicturePiece:
    a, generator = part.architecture, torch.Generator().manual_seed(seed)
    x = torch.randn(pictures, a.tokens, a.patch_dim if part.reads_patches else a.features, generator=generator)
    return PicturePiece(x, sigma, torch.randint(len(a.classes) + 1, (pictures,), generator=generator))


@pytest.mark.parametrize(("kind", "index"), PARTS)
@pytest.mark.parametrize("architecture", [TINY, LARGER], ids=["tiny", "larger"])
def test_a_runner_computes_the_output_of_the_part(architecture: Any, kind: Any, index: int) -> None:
    part = tiny_part(index, kind, architecture)
    given = piece(part, 5, 0.4)
    expected = part(given.x, torch.full((5,), 0.4), given.classes)
    (found,) = Backend().picture(part).evaluate([given])
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("architecture", [TINY, LARGER], ids=["tiny", "larger"])
def test_pictures_are_batch_invariant(architecture: Any) -> None:
    for kind, index in PARTS:
        runner = Backend().picture(part := tiny_part(index, kind, architecture))
        pieces = [piece(part, count, sigma, count) for count, sigma in ((1, 80.0), (40, 0.3), (2, 0.3), (7, 0.01))]
        together = runner.evaluate(pieces)
        for given, found in zip(pieces, together, strict=True):
            assert torch.equal(runner.evaluate([given])[0], found)
            last = PicturePiece(given.x[-1:], given.sigma, given.classes[-1:])
            assert torch.equal(runner.evaluate([last])[0], found[-1:])


class Sociable(PictureRunner):
    """Its results depend on how many pictures there are."""

    def __init__(self, part: PicturePart) -> None:
        self.runner, self.most = PackedPictures(part), 0

    def evaluate(self, pieces: Sequence[PicturePiece]) -> list[Tensor]:
        count = sum(piece.x.shape[0] for piece in pieces)
        self.most = max(self.most, count)
        return [x + 1e-6 * count for x in self.runner.evaluate(pieces)]


def test_without_batch_invariance_each_picture_is_computed_alone(caplog: pytest.LogCaptureFixture) -> None:
    part = tiny_part()
    sociable = Sociable(part)
    runner = checked(sociable, part)
    assert "computed one at a time" in caplog.text
    sociable.most, given = 0, piece(part, 3, 1.0)
    (found,) = runner.evaluate([given])
    assert sociable.most == 1
    assert torch.equal(found[:1], runner.evaluate([PicturePiece(given.x[:1], 1.0, given.classes[:1])])[0])
