"""The probe: losses that agree with cross-entropies written out, and the gate that they make."""

import math

import pytest
import torch
from torch import Tensor

from stages.checkpoint.gate import PROBE_TEXT, probe_block, probe_tokens
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import CheckpointError
from stages.model.architecture import Architecture
from stages.model.partition import NoisePartition
from stages.model.randomness import Purpose, normals
from tests.stages.checkpoints import ALL, Copy, load
from tests.stages.conftest import edit_manifest, forge, make_block


def test_the_probe_text_is_cut_to_the_context() -> None:
    for context, cut in ((4, b"abcd"), (100, b"abcdef")):
        manifest = Manifest("ar", Architecture(context_length=context), (), probe_text="abcdef")
        assert probe_tokens(manifest).tolist() == [list(cut)]


def test_the_losses_of_a_block_are_cross_entropies(partition: NoisePartition) -> None:
    block = make_block()
    known = torch.tensor([*PROBE_TEXT.encode()])[None, :96]
    measures = probe_block(block, partition, known)
    chances = block.predict(known)[0].log_softmax(dim=-1)
    expected = -sum(float(chances[i, known[0, i + 1]]) for i in range(95)) / 95
    assert measures["next_byte_nats"] == pytest.approx(expected, abs=1e-4)

    _, memory = block.read(known[:, :48])
    sigma = math.sqrt(8.0 * 1.5)
    z = block.codes[known[:, 48:]] + sigma * normals(0, Purpose.INITIAL_NOISE, 48, 48, 8)
    chances = block.denoise(z, torch.zeros_like(z), torch.full((1, 1), sigma), memory, 48)[0].log_softmax(dim=-1)
    expected = -sum(float(chances[i, known[0, 48 + i]]) for i in range(48)) / 48
    assert measures["denoise_nats"] == pytest.approx(expected, abs=1e-4)


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
def test_weights_in_the_wrong_place_are_refused(checkpoint: Copy, name: str, part: int, mapping) -> None:
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
def test_weights_that_miss_the_recorded_loss_are_refused(checkpoint: Copy, name: str, change: float) -> None:
    directory = checkpoint(name)
    probe = read_manifest(directory).parts[1].probe
    for measure, value in probe.items():
        edit_manifest(directory, lambda r, m=measure, v=value: r["parts"][1]["probe"].update({m: v + change}))
        with pytest.raises(CheckpointError, match=f"{measure} on the probe"):
            load(directory, 1)
        edit_manifest(directory, lambda record, m=measure, v=value: record["parts"][1]["probe"].update({m: v}))
    assert load(directory, 1).index == 1


@ALL
def test_a_part_without_recorded_losses_is_refused(checkpoint: Copy, name: str) -> None:
    directory = checkpoint(name)
    edit_manifest(directory, lambda record: record["parts"][0].update(probe={}))
    with pytest.raises(CheckpointError, match="recorded nan"):
        load(directory, 0)
