"""Qwen 3 as a mixture of experts in every layer."""

from dataclasses import replace
from typing import Any

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import Config, every_layer, window
from onesweep.stages.importing.families.qwen3 import QWEN3
from onesweep.stages.model.decoder_options import Experts

EXPERTS = {
    "mlp.gate": "router",
    "mlp.experts.*.gate_proj": "experts.*.gate",
    "mlp.experts.*.up_proj": "experts.*.up",
    "mlp.experts.*.down_proj": "experts.*.mlp_out",
}
GGUF_EXPERTS = {
    "ffn_gate_inp": "router",
    "ffn_gate_exps": "experts.*.gate",
    "ffn_up_exps": "experts.*.up",
    "ffn_down_exps": "experts.*.mlp_out",
}


def _options(config: Config) -> dict[str, Any]:
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
    options=_options,
    defaults={"sliding_window": 4096},
    gguf_settings=lambda _: {"norm_topk_prob": True},
)
