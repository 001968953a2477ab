"""Weights that load, and are not what they should be, are refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.errors import CheckpointError
from stages.importing.importing import loss_of
from tests.stages.importing.published import write_folder

Weights = dict[str, Tensor]


def of_another_tokenizer(weights: Weights) -> Weights:
    return weights | {"embedding.weight": weights["embedding.weight"].roll(37, 0)}


def randomized(weights: Weights) -> Weights:
    torch.manual_seed(0)
    return {name: x if x.dim() == 1 else 0.02 * torch.randn(x.shape) for name, x in weights.items()}


@pytest.mark.parametrize("damage", [of_another_tokenizer, randomized])
def test_a_loss_near_that_of_random_weights_is_refused(
    imported: Any, weights: Weights, tmp_path: Path, damage: Callable[[Weights], Weights]
) -> None:
    folder = write_folder(tmp_path / "model", damage(weights))
    refusal = r"^weights loaded but mis-mapped: .* ln\(300\) = 5.70 .* random weights are imported with --untrained"
    with pytest.raises(CheckpointError, match=refusal):
        imported(folder)
    assert not (tmp_path / "out").exists()


def test_random_weights_are_imported_when_said_to_be(imported: Any, weights: Weights, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", randomized(weights))
    assert loss_of(imported(folder, is_untrained=True)) == pytest.approx(math.log(300), abs=0.2)
