"""Families: from a folder and from a GGUF file, each computes what `transformers` computes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.backends import Backend
from stages.backends.base import CleanPiece, StageRunner
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.inspect import record
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from stages.importing.families import FAMILIES, family_named, gguf_family
from stages.importing.gguf_file import interleaved
from stages.importing.huggingface import HuggingFaceSource
from stages.importing.importing import ImportSettings, import_model, open_source
from stages.importing.source import expected_shapes
from stages.model.architecture import LinearScaling, LlamaArchitecture
from stages.model.layers import LayerCache
from stages.model.pipeline import new_caches
from tests.stages.importing.published import describe, letters_metadata
from tests.stages.importing.test_parity import SIZES, TOLERANCE, transformers
from tests.stages.model.tiny_llama import tiny_tokenizer

__all__ = ["transformers"]

SMALL = {**SIZES, "num_key_value_heads": 2, "eos_token_id": 299, "pad_token_id": 0, "bos_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Sizes of the model -> GGUF's keys, beside those that every file has.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "grouped queries": ("Llama", {"rms_norm_eps": 1e-3}, {}),
    "llama 3 scaling": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}, {}),
    "head_dim": ("Llama", {"head_dim": 12, "num_key_value_heads": 1}, {}),
    "attention bias": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}, {}),
    "mistral": ("Mistral", {"sliding_window": 30}, {"sliding_window": 30}),
    "qwen 2": ("Qwen2", {}, {}),
    "qwen 2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, {}),
    "linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}, {}),
    "qwen 3": ("Qwen3", {"head_dim": 16}, {}),
    "qwen 3, window": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        {},
    ),
    "phi 3": (
        "Phi3",
        {"num_key_value_heads": 4, "sliding_window": 20, "partial_rotary_factor": 0.5},
        {"rope_dimension_count": 4, "sliding_window": 20},
    ),
    "phi 3, whole heads": ("Phi3", {}, {}),
    "olmo 2": ("Olmo2", {}, {}),
    "gemma 2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20, "attn_logit_softcapping": 5.0},
        {"sliding_window": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    ),
    "gemma 2, query scale": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 40}, {"sliding_window": 4096}),
    "gemma 3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"sliding_window": 20},
    ),
    "qwen 3, experts": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24},
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
        {"expert_count": 4, "expert_used_count": 2, "sliding_window": 20},
    ),
}
# A GGUF file does not hold these: llama.cpp knows them for the published models.
UNSAID = ("llama 3 scaling", "attention bias", "qwen 2, window", "qwen 3, window", "gemma 2, query scale")
POSITIONS, WRITTEN = 60, 8


@dataclass(frozen=True)
class Made:
    """A model of random weights, and what became of it."""

    model: Any
    folder: Path
    out: Path
    more: dict[str, Any] | None  # in a GGUF file, beyond the usual; None if that is too little

    def runners(self) -> list[StageRunner]:
        """Its stages as a host runs them."""
        return [Backend().stage(load_stage(self.out, i)) for i in range(self.architecture.parts)]

    @property
    def architecture(self) -> LlamaArchitecture:
        found = read_manifest(self.out).architecture
        assert isinstance(found, LlamaArchitecture)
        return found

    def caches(self, capacity: int) -> list[list[LayerCache]]:
        a = self.architecture
        return [new_caches(a.layers_in(i), a, capacity) for i in range(a.parts)]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family, changes, more = MODELS[request.param]
    folder, out = (tmp_path_factory.mktemp("family") / name for name in ("model", "out"))
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"  # others leave the soft cap out
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms too, which begin as ones
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer(300))
    import_model(ImportSettings(folder, out, 2, is_untrained=True))
    assert record(out)["ar"]["parameters"] == model.num_parameters(), "a tied head once"
    return Made(model, folder, out, None if request.param in UNSAID else more)


def piece(x: Tensor, caches: list[LayerCache]) -> CleanPiece:
    """A short one is one by one."""
    return CleanPiece(x, caches, one_by_one=0 if len(x) >= 20 else len(x))


def logits(runners: list[StageRunner], caches: list[list[LayerCache]], pieces: list[Tensor]) -> Tensor:
    """After each position of pieces that come one after the other, long ones at once: (positions, vocabulary)."""
    found = []
    for x in pieces:
        for runner, held in zip(runners, caches, strict=True):
            (x,) = runner.read([piece(x, held)])
        found += runners[-1].next_byte([x])
    return torch.cat(found)


@torch.inference_mode()
def test_an_imported_model_computes_the_logits_of_transformers(made: Made) -> None:
    """Logits beyond the window, of a prompt in pieces, and greedy tokens."""
    tokens, runners = torch.randint(300, (POSITIONS,)), made.runners()
    found = logits(runners, made.caches(POSITIONS), list(tokens.split([30, 20, 7, 1, 1, 1])))
    expected = made.model(tokens[None]).logits[0]
    assert float((found - expected).abs().max()) < TOLERANCE
    assert torch.equal(found.argmax(1), expected.argmax(1))
    written = made.model.generate(tokens[None, :9], max_new_tokens=WRITTEN, do_sample=False, eos_token_id=None)[0]
    caches, known, new = made.caches(9 + WRITTEN), tokens[:9], tokens[:9]
    for _ in range(WRITTEN):
        new = logits(runners, caches, [new])[-1:].argmax(1)
        known = torch.cat([known, new])
    assert torch.equal(known, written)


@torch.inference_mode()
def test_imported_models_are_batch_invariant(made: Made) -> None:
    runners = made.runners()
    x = [torch.randint(300, (count,)) for count in (40, 3, 17)]
    together, alone = ([made.caches(44) for _ in x] for _ in range(2))
    for _ in range(3):
        apart = [logits(runners, caches, [each]) for caches, each in zip(alone, x, strict=True)]
        for i, runner in enumerate(runners):
            x = runner.read([piece(each, caches[i]) for caches, each in zip(together, x, strict=True)])
        found = runners[-1].next_byte(x)
        assert all(map(torch.equal, found, apart))
        x = [each[-1:].argmax(1) for each in found]


def test_a_gguf_file_holds_the_same_model(made: Made, tmp_path: Path) -> None:
    if made.more is None:
        pytest.skip("a GGUF file says nothing of these options")
    one, other = open_source(made.folder), open_source(write_gguf(tmp_path / "model.gguf", made.folder, made.more))
    assert other.architecture == one.architecture
    one.check()
    other.check()
    for name in expected_shapes(one.architecture):
        torch.testing.assert_close(other.tensor(name), one.tensor(name), rtol=1e-6, atol=1e-6)


MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["FalconForCausalLM"]}, ", ".join(family.name for family in FAMILIES)),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn' is not supported; supported: none"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "rotary scaling 'longrope' is not supported; supported: none, 'linear' and 'llama3'",
        ),
        ({"hidden_act": "relu"}, "'relu' is not supported; supported: silu and gelu_pytorch_tanh"),
        ({"num_hidden_layers": 10**12}, "layers of a stage must be a whole number from 1 to 1024"),
        ({**MIXTURE, "num_experts": 1 << 20}, "experts: count must be a whole number from 2 to 32768, not 1048576"),
        ({**MIXTURE, "num_experts_per_tok": 9}, "experts: used must be a whole number from 1 to 8, not 9"),
        ({**MIXTURE, "mlp_only_layers": [1]}, "mixtures in some layers only"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "attention to later tokens"),
    ],
)
def test_an_unsupported_model_is_refused_with_advice(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["Qwen3ForCausalLM"], **changes}))
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_mixture", "sentence"),
    [
        ("falcon", False, "'falcon' is not supported in GGUF; supported: llama, qwen2, qwen3, phi3, olmo2, gemma2"),
        ("qwen2", True, "'qwen2' as a mixture of experts is not supported in GGUF; supported: qwen3moe, llama"),
    ],
)
def test_a_gguf_file_of_an_unknown_family_is_refused(name: object, is_mixture: bool, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        gguf_family(name, is_mixture)


# As the published models say it, in words that `transformers` has changed since.
PUBLISHED: dict[str, str] = {
    "Gemma3ForCausalLM": """{
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000, "rope_theta": 1000000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 512, "sliding_window_pattern": 6
    }""",
    "Gemma2ForCausalLM": """{
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "max_position_embeddings": 8192, "vocab_size": 256000, "hidden_act": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 224, "rope_theta": 10000.0
    }""",
    "Qwen3MoeForCausalLM": """{
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "max_position_embeddings": 40960, "vocab_size": 151936, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "moe_intermediate_size": 768, "rope_theta": 1000000.0, "sliding_window": null, "mlp_only_layers": []
    }""",
    "MixtralForCausalLM": """{
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "vocab_size": 32000, "sliding_window": null,
        "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0
    }""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_like_transformers(transformers: Any, name: str) -> None:
    kind = name.removesuffix("ForCausalLM")
    fields, family = json.loads(PUBLISHED[name]), family_named(name)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**fields)
    assert family.architecture(fields) == family.architecture(json.loads(config.to_json_string()))


def write_gguf(path: Path, folder: Path, more: dict[str, Any]) -> Path:
    """As llama.cpp's converter writes the folder, by the names that the package gguf has for the family."""
    import gguf

    source = HuggingFaceSource(folder)
    a, name = source.architecture, source.family.gguf or "llama"
    writer = gguf.GGUFWriter(path, name)
    if isinstance(a.rope_scaling, LinearScaling):
        more = {**more, "rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": a.rope_scaling.factor}
    describe(writer, a, {**letters_metadata(), **more})
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(arch, a.total_layers)
    for theirs, tensor in stacked(load_file(folder / "model.safetensors")).items():
        kind = theirs.split(".")[-2]
        if source.family.offset_norms and kind.endswith("norm"):
            tensor = tensor + 1
        if name == "llama" and kind in ("q_proj", "k_proj"):
            tensor = interleaved(tensor, a.heads if kind == "q_proj" else a.kv_heads)
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
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if ".experts.0." in name:
            names = (name.replace(".experts.0.", f".experts.{i}.") for i in range(len(tensors)))
            found[name.replace(".experts.0.", ".experts.")] = torch.stack([tensors[n] for n in names if n in tensors])
        elif ".experts." not in name:
            found[name] = tensor
    return found
