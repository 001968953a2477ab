"""The gate: digests and shapes fit, but the weights do not mean what they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from tests.stages.checkpoints import ALL, Copy, EditManifest, Forge, load


def swapped_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {other.get(name[:9], name[:9]) + name[9:]: tensor for name, tensor in tensors.items()}


def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A square matrix stored the other way round, as between two frameworks' conventions."""
    name = "layers.1.attention_out.weight"
    return {**tensors, name: tensors[name].T.contiguous()}


def rolled_qkv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values in another order."""
    return {k: v.roll(32, 0).contiguous() if k.endswith("qkv.weight") else v for k, v in tensors.items()}


def untrained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {k: v if k.startswith("probe.") else 0.02 * torch.randn(v.shape) for k, v in tensors.items()}


@ALL
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("mapping", [swapped_layers, transposed, rolled_qkv, untrained])
def test_weights_in_the_wrong_place_are_refused(
    checkpoint: Copy, forge: Forge, name: str, part: int, mapping: Callable[..., dict[str, Tensor]]
) -> None:
    directory = checkpoint(name)
    recorded = read_manifest(directory).parts[part].probe
    forge(directory, part, mapping)
    with pytest.raises(CheckpointError, match=f"part {part} is refused") as refusal:
        load(directory, part)
    message = str(refusal.value)
    assert "ln(256) = 5.545" in message
    measure = next(name for name in recorded if name in message)
    assert f"the manifest recorded {recorded[measure]:.4f}" in message
    assert load(directory, 1 - part).index == 1 - part


@ALL
@pytest.mark.parametrize("change", [0.05, -0.05, 1e300])
def test_a_recorded_loss_that_is_not_met(
    checkpoint: Copy, edit_manifest: EditManifest, name: str, change: float
) -> None:
    directory = checkpoint(name)
    probe = read_manifest(directory).parts[1].probe
    for measure, value in probe.items():
        edit_manifest(directory, lambda r, m=measure, v=value: r["parts"][1]["probe"].update({m: v + change}))
        with pytest.raises(CheckpointError, match=f"{measure} on the probe text"):
            load(directory, 1)
        edit_manifest(directory, lambda record, m=measure, v=value: record["parts"][1]["probe"].update({m: v}))
    assert load(directory, 1).index == 1


@ALL
def test_a_gate_without_measures_lets_nothing_through(checkpoint: Copy, edit_manifest: EditManifest, name: str) -> None:
    directory = checkpoint(name)
    edit_manifest(directory, lambda record: record["parts"][0].update(probe={}))
    with pytest.raises(CheckpointError, match="recorded nan"):
        load(directory, 0)
