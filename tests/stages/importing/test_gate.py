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
from tests.stages.importing.published import SHAPE, interleaved, write_folder, write_gguf

Weights = dict[str, Tensor]


def heads(weights: Weights) -> Weights:
    """As in GGUF."""
    counts = {"q": SHAPE.heads, "k": SHAPE.kv_heads}
    kinds = {name: name.split(".")[2] for name in weights if name.startswith("layers.")}
    return weights | {n: interleaved(weights[n], counts[kind]) for n, kind in kinds.items() if kind in counts}


def exchanged(weights: Weights) -> Weights:
    other = {"k": "v", "v": "k"}
    return {".".join(other.get(part, part) for part in name.split(".")): x for name, x in weights.items()}


def randomized(weights: Weights) -> Weights:
    torch.manual_seed(0)
    return {name: x if x.dim() == 1 else 0.02 * torch.randn(x.shape) for name, x in weights.items()}


@pytest.mark.parametrize("damage", [heads, exchanged, randomized])
def test_a_loss_near_that_of_random_weights_is_refused(
    imported: Any, weights: Weights, tmp_path: Path, damage: Callable[[Weights], Weights]
) -> None:
    folder = write_folder(tmp_path / "model", damage(weights))
    refusal = r"^weights loaded but mis-mapped: .* ln\(300\) = 5.70 .* random weights are imported with --untrained"
    with pytest.raises(CheckpointError, match=refusal):
        imported(folder)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_without_its_permutation_is_refused(imported: Any, weights: Weights, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'onesweep[pretrained]'")
    path = write_gguf(tmp_path / "model.gguf", weights, permuted=False)
    with pytest.raises(CheckpointError, match="mis-mapped"):
        imported(path)


def test_random_weights_are_imported_when_said_to_be(imported: Any, weights: Weights, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", randomized(weights))
    assert loss_of(imported(folder, is_untrained=True)) == pytest.approx(math.log(300), abs=0.2)
