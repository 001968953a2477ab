"""Families beyond Llama's: from a folder and from a GGUF file, each computes what `transformers` computes."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onesweep.stages.backends import backend_named
from onesweep.stages.backends.base import CleanPiece
from onesweep.stages.checkpoint.checkpoint import load_stage
from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families import FAMILIES
from onesweep.stages.importing.gguf_file import GgufSource
from onesweep.stages.importing.huggingface import HuggingFaceSource
from onesweep.stages.importing.importing import Imported, open_source
from onesweep.stages.importing.source import expected_shapes
from onesweep.stages.model.llama import LlamaArchitecture
from onesweep.stages.model.pipeline import new_caches
from tests.stages.importing.published import describe_letters
from tests.stages.importing.test_parity import SIZES, TOLERANCE, logits_of, transformers
from tests.stages.model.tiny_llama import tiny_tokenizer

__all__ = ["transformers"]

SMALL = {**SIZES, "num_key_value_heads": 2, "eos_token_id": 299, "pad_token_id": 0, "bos_token_id": 1}
# Sizes of the model -> GGUF's keys, beside those that every file has.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen 3": ("Qwen3", {"head_dim": 16}, {}),
    "qwen 3, window": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        {},
    ),
}
POSITIONS, WRITTEN = 60, 8
Made = tuple[Any, Path, dict[str, Any]]


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, transformers: Any, tmp_path: Path) -> Made:
    """A model of random weights, its folder, and what a GGUF file says of it beyond the usual."""
    family, changes, said = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"  # others leave the soft cap out
    kind = "ForCausalLM"
    model = getattr(transformers, f"{family.removesuffix('Text')}{kind}")(config).eval()
    for parameter in model.parameters():  # biases and norms too, which begin as zeros and ones
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(tiny_tokenizer(300))
    return model, tmp_path / "model", said


@torch.inference_mode()
def test_it_computes_what_transformers_computes(made: Made, imported: Callable[..., Imported]) -> None:
    """Logits beyond the window, and greedy tokens."""
    model, folder, _ = made
    manifest = imported(folder, blocks=3, is_untrained=True).manifest
    tokens = torch.randint(300, (POSITIONS,))
    found, expected = logits_of(folder.parent / "out", manifest, tokens), model(tokens[None]).logits[0]
    assert float((found - expected).abs().max()) < TOLERANCE
    assert torch.equal(found.argmax(1), expected.argmax(1))
    written = model.generate(tokens[None, :9], max_new_tokens=WRITTEN, do_sample=False, eos_token_id=None)[0]
    known = tokens[:9]
    while len(known) < len(written):
        known = torch.cat([known, logits_of(folder.parent / "out", manifest, known)[-1:].argmax(1)])
    assert torch.equal(known, written)


@torch.inference_mode()
def test_company_changes_no_bit(made: Made, imported: Callable[..., Imported]) -> None:
    _, folder, _ = made
    manifest = imported(folder, blocks=1, is_untrained=True).manifest
    a = manifest.architecture
    runner = backend_named("torch").stage(load_stage(folder.parent / "out", 0))
    texts = [torch.randint(300, (count,)) for count in (40, 3, 17)]
    pieces = [CleanPiece(text, new_caches(a.layers_in(0), a, 44)) for text in texts]
    alone = copy.deepcopy(pieces)
    for _ in range(3):
        together = runner.next_byte(runner.read(pieces))
        for one, piece in zip(together, alone, strict=True):
            assert torch.equal(one, runner.next_byte(runner.read([piece]))[0])
        following = [logits[-1:].argmax(1) for logits in together]
        pieces, alone = (
            [CleanPiece(symbol, piece.caches) for symbol, piece in zip(following, those, strict=True)]
            for those in (pieces, alone)
        )


def test_a_gguf_file_of_it_is_the_same_model(made: Made, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'onesweep[pretrained]'")
    model, folder, said = made
    if model.config.to_dict().get("use_sliding_window"):
        pytest.skip("a GGUF file says nothing of this window")
    one, other = open_source(folder), open_source(write_gguf(tmp_path / "model.gguf", model, folder, said))
    assert isinstance(one, HuggingFaceSource)
    assert isinstance(other, GgufSource)
    assert other.architecture == one.architecture
    one.check()
    other.check()
    for name in expected_shapes(one.architecture):
        torch.testing.assert_close(other.tensor(name), one.tensor(name), rtol=1e-6, atol=1e-6)


def test_what_is_not_known_is_refused_with_what_is(made: Made) -> None:
    _, folder, _ = made
    path = folder / "config.json"
    config = json.loads(path.read_text())
    refusals = [
        ({"architectures": ["FalconForCausalLM"]}, ", ".join(family.name for family in FAMILIES)),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported; there are none, 'linear' and 'llama3'"),
        (
            {"hidden_act": "relu", "hidden_activation": "relu"},
            "'relu' is not supported; there are silu and",
        ),
        ({"num_hidden_layers": 10**12}, "layers of a stage must be a whole number from 1 to 1024"),
        ({"hidden_size": 1 << 40}, "width must be a whole number from 2 to 65536"),
    ]
    for changes, sentence in refusals:
        path.write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            open_source(folder)


def write_gguf(path: Path, model: Any, folder: Path, said: dict[str, Any]) -> Path:
    """As llama.cpp's converter writes the folder, by the names that the package gguf has for the family."""
    import gguf

    source = HuggingFaceSource(folder)
    a, name = source.architecture, source.family.gguf
    writer = gguf.GGUFWriter(path, name)
    describe(writer, a, said)
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(arch, a.total_layers)
    for theirs, tensor in stacked(load_file(folder / "model.safetensors")).items():
        kind = theirs.split(".")[-2]
        if source.family.offset_norms and kind.endswith("norm"):
            tensor = tensor + 1
        if theirs == "lm_head.weight" and a.tied_head:
            continue
        writer.add_tensor(names.get_name(theirs, (".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the matrices of all experts in one tensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := re.search(r"\.experts\.0\.", name):
            each = [
                tensors[f"{name[: match.start()]}.experts.{i}.{name[match.end() :]}"]
                for i in range(len(tensors))
                if f"{name[: match.start()]}.experts.{i}.{name[match.end() :]}" in tensors
            ]
            found[name.replace(".experts.0.", ".experts.")] = torch.stack(each)
        elif ".experts." not in name:
            found[name] = tensor
    return found


def describe(writer: Any, a: LlamaArchitecture, said: dict[str, Any]) -> None:
    writer.add_block_count(a.total_layers)
    writer.add_context_length(a.positions)
    writer.add_embedding_length(a.width)
    writer.add_feed_forward_length(a.mlp_width)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_layer_norm_rms_eps(a.norm_epsilon)
    writer.add_rope_freq_base(a.rope_theta)
    for name, value in said.items():
        getattr(writer, f"add_{name}")(value)
    describe_letters(writer)
