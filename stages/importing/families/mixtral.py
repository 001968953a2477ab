"""Mixtral: Mistral as a mixture of experts. In GGUF it is called llama, too."""

from dataclasses import replace
from typing import Any

from onesweep.stages.importing.families.base import Config, every_layer, window
from onesweep.stages.importing.families.llama import MISTRAL
from onesweep.stages.importing.families.qwen3_moe import GGUF_EXPERTS
from onesweep.stages.model.decoder_options import Experts


def _options(config: Config) -> dict[str, Any]:
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
    options=_options,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    rope_theta=1e6,
)
