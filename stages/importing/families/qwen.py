"""Qwen 2 and 2.5: a bias on queries, keys and values; a window on the last layers, if it is switched on. Qwen 3: each
head's queries and keys are normed before they are rotated; also as a mixture of experts in every layer."""

from dataclasses import replace
from typing import Any

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    QK_NORM,
    TENSORS,
    Config,
    ModelFamily,
    every_layer,
    sliding_layers,
    window,
)
from onesweep.stages.model.decoder_options import Experts

# Layers below it see everything.
FIRST_WINDOW_LAYER = 28


def _late_window(config: Config) -> dict[str, Any]:
    """The option of a window that only later layers have."""
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
        raise CheckpointError(
            "layers of which some are mixtures (decoder_sparse_step, mlp_only_layers) are not supported"
        )
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
