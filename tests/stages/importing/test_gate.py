"""Weights that load, but are mapped wrongly: each error is refused, with its cause."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.errors import CheckpointError
from stages.importing.gate import Variant, interleaved, losses
from stages.importing.huggingface import HuggingFaceSource
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import llama_rotary
from tests.stages.importing.published import SHAPE, write_folder, write_gguf

SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 16}
Weights = dict[str, Tensor]
Break = Callable[[Weights], Weights]


def heads(weights: Weights) -> Weights:
    """As in GGUF."""
    counts = {"q": SHAPE.heads, "k": SHAPE.kv_heads}
    kinds = {name: name.split(".")[2] for name in weights if name.startswith("layers.")}
    return weights | {n: interleaved(weights[n], counts[kind]) for n, kind in kinds.items() if kind in counts}


def exchanged(weights: Weights) -> Weights:
    other = {"k": "v", "v": "k"}
    return {".".join(other.get(part, part) for part in name.split(".")): x for name, x in weights.items()}


def transposed(weights: Weights) -> Weights:
    return {name: x.T.contiguous() if ".gate." in name else x for name, x in weights.items()}


def one_tensor(weights: Weights) -> Weights:
    name = "layers.1.up.weight"
    generator = torch.Generator().manual_seed(1)
    return weights | {name: 3 * torch.randn(weights[name].shape, generator=generator)}


def whole(weights: Weights) -> Weights:
    return weights


@pytest.mark.parametrize(
    ("damage", "config", "cause"),
    [
        (heads, {}, "query and key head de-interleaved (head layout)"),
        (whole, {"rope_theta": 100.0}, "rotary theta 10000 instead of 100"),
        (whole, {"rope_scaling": SCALING}, "another rotary scaling"),
        (whole, {"rms_norm_eps": 0.1}, "norm epsilon 1e-0"),  # 1e-5 and 1e-6 are the same for these weights
        (whole, {"tie_word_embeddings": True}, "the head's own tensor head.weight instead of the tied embedding"),
        (exchanged, {}, "tensors layers.*.k.weight and layers.*.v.weight exchanged"),
        (transposed, {}, "tensors layers.*.gate.weight transposed"),
        (one_tensor, {}, "one half of layer 1 left out (its tensors gate, up, mlp_out, mlp_norm)"),
    ],
    ids=["heads", "theta", "scaling", "epsilon", "tied", "exchanged", "transposed", "one tensor"],
)
def test_mis_mapped_weights_are_refused_with_the_cause(
    imported: Any, weights: Weights, tmp_path: Path, damage: Break, config: dict[str, Any], cause: str
) -> None:
    folder = write_folder(tmp_path / "model", damage(weights), **config)
    with pytest.raises(CheckpointError, match=r"^weights loaded but mis-mapped: .* ln\(300\) = 5.70") as refusal:
        imported(folder)
    assert cause in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_without_its_permutation_is_refused(imported: Any, weights: Weights, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", weights, permuted=False)
    with pytest.raises(CheckpointError, match=r"mis-mapped.*interleaved \(head layout\)"):
        imported(path)


def test_random_weights_are_refused_unless_declared_untrained(imported: Any, weights: Weights, tmp_path: Path) -> None:
    torch.manual_seed(0)
    random = {name: x if x.dim() == 1 else 0.02 * torch.randn(x.shape) for name, x in weights.items()}
    folder = write_folder(tmp_path / "model", random)
    with pytest.raises(CheckpointError, match=r"no single change .* fixes it; to import random weights, give"):
        imported(folder)
    assert imported(folder, is_untrained=True).metrics["probe"]["next_token_nats"] == pytest.approx(
        math.log(300), abs=0.2
    )


def test_a_long_context_takes_no_memory(weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a million positions for each reading would take gigabytes."""
    made = []

    def table(architecture: LlamaArchitecture, slides: bool) -> Tensor:
        made.append(llama_rotary(architecture, slides))
        return made[-1]

    monkeypatch.setattr("stages.importing.gate.llama_rotary", table)
    source = HuggingFaceSource(write_folder(tmp_path, weights, max_position_embeddings=1 << 20))
    assert losses(source, list(range(40, 90)), [Variant("", source.architecture)])
    assert [x.shape[1] for x in made] == [50]
