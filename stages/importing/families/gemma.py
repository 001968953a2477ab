"""Gemma 2: norms before and after, soft caps, and a window on every other layer. Gemma 3 (text): norms of queries and
keys in place of soft caps, and a window on five of six layers, which have a rotary base of their own."""

from dataclasses import replace
from typing import Any

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import (
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
    """Options of Gemma 2 and 3."""
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("attention to later tokens (use_bidirectional_attention) is not supported")
    options = {"query_scalar": config["query_pre_attn_scalar"], "logit_softcap": config["final_logit_softcapping"]}
    return {"norms": "both", **options}


def _gguf_query_scalar(config: Config, largest: int) -> dict[str, Any]:
    """The scale of queries, which GGUF leaves out: that of a head, but for the family's largest model.

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
        raise CheckpointError(f"rotary scaling {local['rope_type']!r} of layers that slide is not supported")
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
