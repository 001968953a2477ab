"""Phi 3: one tensor for queries, keys and values, one for the gate and what it multiplies; a part of a head is rotated.

Its longer contexts (`longrope`, once called `su`) change the angles of all positions when a text grows past a length,
which a cache of keys cannot follow: such models are refused.
"""

from typing import Any

from onesweep.stages.importing.families.base import (
    GGUF_TENSORS,
    TENSORS,
    Config,
    ModelFamily,
    every_layer,
    rope_of,
    window,
)


def _options(config: Config) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    turned = config.get("rotary_dim") or int(head_dim * factor)
    return {"rotary_dim": None if turned == head_dim else turned, **window(config, every_layer(config))}


PHI3 = ModelFamily(
    "Phi3ForCausalLM",
    gguf="phi3",
    tensors=TENSORS | {"self_attn.qkv_proj": "q k v", "mlp.gate_up_proj": "gate up"},
    gguf_tensors=GGUF_TENSORS | {"attn_qkv": "q k v", "ffn_up": "gate up"},
    options=_options,
    defaults={"rms_norm_eps": 1e-5},
)
