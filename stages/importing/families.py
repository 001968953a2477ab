"""Supported families of pretrained models, with their names of tensors and their options."""

from dataclasses import replace
from typing import Any

from stages.errors import CheckpointError
from stages.importing.family import (
    EXPERTS,
    GGUF_EXPERTS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    QK_NORM,
    SLIDING,
    TENSORS,
    Config,
    ModelFamily,
    every_layer,
    rope_of,
    sliding_layers,
    window,
)
from stages.model.architecture import Experts

# Llama and families with its layers (SmolLM2, TinyLlama); Mistral, whose layers also have a window; and Mixtral,
# Mistral as a mixture of experts. In GGUF all are called llama.

LLAMA = ModelFamily("LlamaForCausalLM")
MISTRAL = ModelFamily(
    "MistralForCausalLM",
    gguf="llama",
    options=lambda config: window(config, every_layer(config)),
    defaults={"sliding_window": 4096},
    interleaved=True,
)


def _mixtral_options(config: Config) -> dict[str, Any]:
    count = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    experts = Experts(count, config["num_experts_per_tok"], normalised=True)
    return {"experts": experts, **window(config, every_layer(config))}


MIXTRAL = replace(
    MISTRAL,
    name="MixtralForCausalLM",
    is_mixture=True,
    tensors={
        **MISTRAL.tensors,
        "block_sparse_moe.gate": "router",
        "block_sparse_moe.experts.*.w1": "experts.*.gate",
        "block_sparse_moe.experts.*.w3": "experts.*.up",
        "block_sparse_moe.experts.*.w2": "experts.*.mlp_out",
    },
    gguf_tensors={**MISTRAL.gguf_tensors, **GGUF_EXPERTS},
    options=_mixtral_options,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    rope_theta=1e6,
)

# Qwen 2 and 2.5: a bias on queries, keys and values; a window on the last layers, if switched on. Qwen 3: each
# head's queries and keys are normed before they are rotated; also as a mixture of experts in every layer.

FIRST_WINDOW_LAYER = 28  # layers below it see everything


def _late_window(config: Config) -> dict[str, Any]:
    """The option of a window on later layers only."""
    if not config.get("use_sliding_window"):
        return {}
    late = (i for i in every_layer(config) if i >= config.get("max_window_layers", FIRST_WINDOW_LAYER))
    return window({"sliding_window": 4096, **config}, sliding_layers(config, late))


QWEN2 = ModelFamily(
    "Qwen2ForCausalLM", gguf="qwen2", options=lambda config: {"attention_bias": "qkv", **_late_window(config)}
)

QWEN3 = ModelFamily(
    "Qwen3ForCausalLM",
    gguf="qwen3",
    tensors=TENSORS | QK_NORM,
    gguf_tensors=GGUF_TENSORS | GGUF_QK_NORM,
    options=lambda config: {"qk_norm": "head", **_late_window(config)},
    defaults={"head_dim": 128},
)


def _mixture_options(config: Config) -> dict[str, Any]:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise CheckpointError("mixtures in some layers only (decoder_sparse_step, mlp_only_layers) are not supported")
    count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    experts = Experts(count, config["num_experts_per_tok"], bool(config.get("norm_topk_prob", False)))
    sliding = window(config, every_layer(config)) if config.get("use_sliding_window") else {}
    return {"qk_norm": "head", "mlp_width": config["moe_intermediate_size"], "experts": experts, **sliding}


QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3MoeForCausalLM",
    gguf="qwen3moe",
    is_mixture=True,
    tensors={**QWEN3.tensors, **EXPERTS},
    gguf_tensors={**QWEN3.gguf_tensors, **GGUF_EXPERTS},
    options=_mixture_options,
    defaults={"sliding_window": 4096},
    gguf_settings=lambda _: {"norm_topk_prob": True},
)


# Phi 3: one tensor for queries, keys and values, one for the gate and up; only part of a head is rotated.
#
# Its longer contexts (`longrope`, formerly `su`) change the angles of all positions once a text exceeds a length,
# which a cache of keys cannot follow, so such models are refused.


def _phi3_options(config: Config) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    turned = config.get("rotary_dim") or int(head_dim * factor)
    return {"rotary_dim": None if turned == head_dim else turned, **window(config, every_layer(config))}


PHI3 = ModelFamily(
    "Phi3ForCausalLM",
    gguf="phi3",
    tensors=TENSORS | {"self_attn.qkv_proj": "q k v", "mlp.gate_up_proj": "gate up"},
    gguf_tensors=GGUF_TENSORS | {"attn_qkv": "q k v", "ffn_up": "gate up"},
    options=_phi3_options,
    defaults={"rms_norm_eps": 1e-5},
)

# OLMo 2: norms after attention and MLP, not before; queries and keys of all heads are normed together.

OLMO2 = ModelFamily(
    "Olmo2ForCausalLM",
    gguf="olmo2",
    tensors=TENSORS
    | QK_NORM
    | {"post_attention_layernorm": "attention_after", "post_feedforward_layernorm": "mlp_after"},
    gguf_tensors=GGUF_TENSORS | GGUF_QK_NORM | {"post_attention_norm": "attention_after", "post_ffw_norm": "mlp_after"},
    options=lambda _: {"qk_norm": "projection", "norms": "after"},
    defaults={"rms_norm_eps": 1e-5},
)

# Gemma 2: norms before and after, soft caps, and a window on every other layer. Gemma 3 (text): norms of queries and
# keys instead of soft caps, and a window on five of six layers, which have their own rotary base.

GEMMA_TENSORS = TENSORS | {
    "post_attention_layernorm": "attention_after",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_after",
}
GEMMA_GGUF_TENSORS = GGUF_TENSORS | {"post_attention_norm": "attention_after", "post_ffw_norm": "mlp_after"}
GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
GEMMA_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
GEMMA_DEFAULTS |= {"tie_word_embeddings": True}
SLIDING_THETA = 10000.0


def _gemma_options(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("attention to later tokens (use_bidirectional_attention) is not supported")
    options = {"query_scalar": config["query_pre_attn_scalar"], "logit_softcap": config["final_logit_softcapping"]}
    return {"norms": "both", **options}


def _gguf_query_scalar(config: Config, largest: int) -> dict[str, Any]:
    """The scale of queries, which GGUF omits: derived from head_dim, except in the family's largest model.

    :param largest: layers of that model. Source: `load_hparams` of llama.cpp.
    """
    width, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    return {"query_pre_attn_scalar": width // heads if layers == largest else config["head_dim"]}


def _gemma2_options(config: Config) -> dict[str, Any]:
    every_other = (i for i in every_layer(config) if i % 2 == 0)
    capped = {"attention_softcap": config["attn_logit_softcapping"], **_gemma_options(config)}
    return capped | window(config, sliding_layers(config, every_other))


GEMMA2 = ModelFamily(
    "Gemma2ForCausalLM",
    gguf="gemma2",
    tensors=GEMMA_TENSORS,
    gguf_tensors=GEMMA_GGUF_TENSORS,
    options=_gemma2_options,
    defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    activation=GEMMA_ACTIVATION,
    gguf_settings=lambda config: _gguf_query_scalar(config, largest=46),
    offset_norms=True,
    scaled_embedding=True,
)


def _gemma3_options(config: Config) -> dict[str, Any]:
    period = config.get("sliding_window_pattern", 6)
    options = window(config, sliding_layers(config, (i for i in every_layer(config) if (i + 1) % period)))
    local = rope_of(config, SLIDING) if SLIDING in (config.get("rope_parameters") or {}) else {}
    theta = config.get("rope_local_base_freq") or local.get("rope_theta") or SLIDING_THETA
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(f"rotary scaling {local['rope_type']!r} of sliding layers is not supported")
    if "window" in options:
        options["window"] = replace(options["window"], rope_theta=float(theta))
    return {"qk_norm": "head", **_gemma_options(config), **options}


GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    gguf="gemma3",
    tensors=GEMMA_TENSORS | QK_NORM,
    gguf_tensors=GEMMA_GGUF_TENSORS | GGUF_QK_NORM,
    options=_gemma3_options,
    defaults={**GEMMA_DEFAULTS, "final_logit_softcapping": None},
    rope_theta=1e6,
    gguf_settings=lambda config: _gguf_query_scalar(config, largest=62),
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3, QWEN3_MOE, MIXTRAL)


def family_named(name: object) -> ModelFamily:
    """The family with this architecture in config.json. Raises CheckpointError that lists the known ones."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(family.name for family in FAMILIES)
        cause = f"the architecture {name} is not supported" if name else "config.json names no model in `architectures`"
        raise CheckpointError(f"{cause}; supported: {known}")
    return found


def gguf_family(name: object, is_mixture: bool) -> ModelFamily:
    """The family with this architecture name in GGUF, with or without experts. Raises CheckpointError that lists the
    known ones."""
    known = {each.gguf: each for each in FAMILIES if each.gguf and each.is_mixture == is_mixture}
    found = known.get(name) if isinstance(name, str) else None
    if found is None:
        kind = " as a mixture of experts" if is_mixture else ""
        raise CheckpointError(f"architecture {name!r}{kind} is not supported in GGUF; supported: {', '.join(known)}")
    return found
