"""Llama and those that have its layers (SmolLM2, TinyLlama); Mistral, whose layers have a window, too; and Mixtral,
Mistral as a mixture of experts. In GGUF all are called llama."""

from dataclasses import replace
from typing import Any

from onesweep.stages.importing.families.base import GGUF_EXPERTS, Config, ModelFamily, every_layer, window
from onesweep.stages.model.decoder_options import Experts

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
