"""Gemma 2: norms before and after, soft caps, and a window on every other layer."""

from typing import Any

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import (
    GGUF_TENSORS,
    TENSORS,
    Config,
    ModelFamily,
    every_layer,
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


def gemma_options(config: Config) -> dict[str, Any]:
    """Options of Gemma 2 and 3."""
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("attention to later tokens (use_bidirectional_attention) is not supported")
    options = {"query_scalar": config["query_pre_attn_scalar"], "logit_softcap": config["final_logit_softcapping"]}
    return {"norms": "both", **options}


def gguf_query_scalar(config: Config, largest: int) -> dict[str, Any]:
    """The scale of queries, which GGUF leaves out: that of a head, but for the family's largest model.

    :param largest: layers of that model. Source: `load_hparams` of llama.cpp.
    """
    width, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    return {"query_pre_attn_scalar": width // heads if layers == largest else config["head_dim"]}


def _options(config: Config) -> dict[str, Any]:
    every_other = (i for i in every_layer(config) if i % 2 == 0)
    capped = {"attention_softcap": config["attn_logit_softcapping"], **gemma_options(config)}
    return capped | window(config, sliding_layers(config, every_other))


GEMMA2 = ModelFamily(
    "Gemma2ForCausalLM",
    gguf="gemma2",
    tensors=GEMMA_TENSORS,
    gguf_tensors=GEMMA_GGUF_TENSORS,
    options=_options,
    defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    activation=GEMMA_ACTIVATION,
    gguf_settings=lambda config: gguf_query_scalar(config, largest=46),
    offset_norms=True,
    scaled_embedding=True,
)
